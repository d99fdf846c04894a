"""What a family's cache layer is: what one layer of the model holds of a cohort's sequences."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.saved_part import Place, SavedPart
from hetero_kv.engine.sequence import Layout
from hetero_kv.engine.statistics import NO_NUMBERS, Tally
from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    from hetero_kv.engine.cohort import Cohort
    from hetero_kv.engine.step import Step


class FamilyLayer(CacheLayerMixin):
    """One layer's part of a cohort. Its operator stores what the layer's attention receives.

    What is in the blocks of its `layout` and how long the sequences are, the cohort knows; the layer holds the rest. By
    default that is `state`, an object that is replaced and never changed, so that going back is a reference to it; a
    layer that holds more overrides `snapshot`, `rollback`, `fork` and `select`.

    Attributes:
        layer_idx: of the model's layer; set when the cache is made.
        layout: of its tokens in blocks; None for a layer without.
        state: see above.
        read: bytes that decoded tokens' attention read, each a row's; a layer that counts them holds them in its
            snapshots.
    """

    is_sliding = False
    #: Whether its forwards are cut into strides: it says `stride`, and `after_all_layers` is called.
    is_strided: ClassVar[bool] = False
    #: Called with the layers of one cohort that have it, and the part of a forward that has passed through all layers.
    after_all_layers: ClassVar[Any] = None

    layer_idx: int
    layout: Layout | None = None
    state: Any = None
    read: Tally = NO_NUMBERS

    _cohort: weakref.ref[Cohort]

    def bind(self, cohort: Cohort, layer_idx: int) -> None:
        """Be layer `layer_idx` of this cohort."""
        # Weakly: a cache that is dropped gives its memory back at once.
        self._cohort, self.layer_idx = weakref.ref(cohort), layer_idx

    @property
    def cohort(self) -> Cohort:
        """The sequences."""
        cohort = self._cohort()
        assert cohort is not None
        return cohort

    # -- what transformers asks of a cache layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys and values on to the operator, which stores what its attention receives.

        Raises HeteroKVError outside of a step, where no operator receives them.
        """
        if self.cohort.step is None:
            raise HeteroKVError(
                f"layer {self.layer_idx} of a HeteroCache was given keys and values outside of a forward of its own "
                "model, whose rules alone store them; pass the cache to the injected model that it was made for"
            )
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare."""
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.cohort.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the mask that `query_length` new tokens would need."""
        return self.cohort.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: no bound of its own."""
        return -1

    def reset(self) -> None:
        """Forget every token and give the memory back."""
        self.state, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """See `select`, which the cache calls with the sequences."""
        self.select(beam_idx.tolist())

    # -- a forward in strides (`is_strided`)

    def begin_turn(self, tokens: int) -> None:
        """`tokens` new tokens are about to come, in one stride or several."""

    @property
    def stride(self) -> int | None:
        """Tokens that may pass through all layers next; None without strides."""
        return None

    @property
    def waits_for_others(self) -> bool:
        """Whether `after_all_layers` has something to do when a decoded token has passed."""
        return False

    # -- a step

    def expect(self, tokens: int) -> bool:
        """`tokens` new tokens are about to come, in one step or several: whether all blocks are to be closed anew."""
        return False

    def begin_prefill(self, step: Step) -> None:
        """The tokens of a prompt are about to arrive in chunks."""

    def end_prefill(self, step: Step) -> Any:
        """All have arrived: store them. What it returns is the operator's to use."""

    def leave_prefill(self) -> None:
        """The prompt has passed through the layer, or failed to."""

    @property
    @abstractmethod
    def is_prefilling(self) -> bool:
        """Whether a prompt is being prefilled in this layer."""

    # -- going back, and going several ways

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on; the cohort cuts the sequences themselves.

        Raises HeteroKVError where that is impossible; `can_crop` says so before.
        """

    #: Whether `crop` is possible.
    can_crop: bool = True

    def snapshot(self) -> Any:
        """What `rollback` needs to come back to the present state."""
        return self.state

    def rollback(self, snapshot: Any) -> None:
        """Come back to the state at `snapshot`; the sequences are as they were then."""
        self.state = snapshot

    def fork(self, memo: dict[int, Any]) -> FamilyLayer:
        """A second layer with the same tokens; `memo` as for copy.deepcopy, one for all layers of a cache."""
        return copy.copy(self)

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Let row i be what row `rows[i]` was: rows leave, are reordered, or go two ways (beam search)."""

    def reopen(self) -> None:
        """Let what queries have chosen of the blocks' contents be chosen anew when the next prompt has passed."""

    # -- in a file

    def saved(self) -> SavedPart:
        """What `restore` needs beside the blocks to go on in another process exactly as this layer would.

        Raises ContextError where the layer's class does not say it.
        """
        raise ContextError(
            f"layer {self.layer_idx} ({type(self).__name__}) cannot be saved: its class has no `saved` and `restore`; "
            "take another operator for that layer, or give its cache layer the two"
        )

    def restore(self, part: SavedPart, place: Place) -> None:
        """Be what `saved` told: this layer is empty, its cohort has the sequences, blocks are filled in later.

        `part` comes from a file that anybody may have written: what is taken of it is checked.

        Raises DamagedContextError where it is none that `saved` could have told.
        """
        raise ContextError(f"layer {self.layer_idx} ({type(self).__name__}) cannot be restored from a file")

    def after_restore(self, part: SavedPart) -> None:
        """What follows `restore` when the blocks hold what they did."""

    # -- what it takes and has counted

    @property
    def dram_bytes(self) -> int:
        """DRAM beside the blocks, bytes."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Memory where the model computes, beside `dram_bytes`."""
        return 0

    @property
    def tables_shared_with_others(self) -> Sequence[Any]:
        """Objects with `nbytes` that several layers hold, counted once by the cache."""
        return ()

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """What was counted, by name: of a row, the mean over the cohort's."""
        return {}
