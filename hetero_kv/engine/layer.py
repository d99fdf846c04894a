"""The interface of a family's cache layer: the part of a group that one layer of the model stores."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.engine.attention_record import AttentionRecord
from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.sequence import Layout
from hetero_kv.engine.statistics import NO_NUMBERS, Tally
from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    from hetero_kv.engine.equal_length_group import EqualLengthGroup
    from hetero_kv.engine.step import Step


class FamilyLayer(CacheLayerMixin):
    """One layer's part of a group. The layer's operator stores the keys and values that its attention receives.

    The group knows the blocks of `layout` and the lengths of the sequences; the layer keeps everything else. By
    default that is `state`, an object that is replaced and never changed, so that a snapshot is a reference to it. A
    layer with more overrides `snapshot`, `rollback`, `fork` and `select`.

    Attributes:
        layer_idx: index of the model's layer; set when the cache is made.
        layout: of its tokens in blocks; None for a layer without blocks.
        state: see above.
        read: bytes that the attention of decoded tokens read, per row; a layer that counts them includes them in its
            snapshots.
        record: where the operator records the attention of the present token; None for no record.
    """

    is_sliding = False
    #: Whether its forwards run in strides: it has `stride`, and `after_all_layers` is called.
    is_strided: ClassVar[bool] = False
    #: Called with the layers of one group that share it, and the part of a forward that is through all layers.
    after_all_layers: ClassVar[Any] = None

    layer_idx: int
    layout: Layout | None = None
    state: Any = None
    read: Tally = NO_NUMBERS
    record: AttentionRecord | None = None

    _group: weakref.ref[EqualLengthGroup]

    def bind(self, group: EqualLengthGroup, layer_idx: int) -> None:
        """Become layer `layer_idx` of this group."""
        # A weak reference, so that a deleted cache frees its memory at once.
        self._group, self.layer_idx = weakref.ref(group), layer_idx

    @property
    def group(self) -> EqualLengthGroup:
        """The group that this layer belongs to."""
        group = self._group()
        assert group is not None
        return group

    # -- the interface of transformers' cache layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values to the attention; the operator stores what its attention receives.

        Raises HeteroKVError outside of a step, where no operator receives them.
        """
        if self.group.step is None:
            raise HeteroKVError(
                f"layer {self.layer_idx} of a HeteroCache received keys and values outside of a forward of its model, "
                "whose operators store them; pass the cache to the injected model that it was made for"
            )
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare."""
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.group.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of a mask for `query_length` new tokens."""
        return self.group.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: the layer itself has no bound."""
        return -1

    def reset(self) -> None:
        """Drop every token and free the memory."""
        self.state, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """See `select`; the cache selects the rows of the sequences."""
        self.select(beam_idx.tolist())

    # -- a forward in strides (`is_strided`)

    def begin_turn(self, tokens: int) -> None:
        """Announce `tokens` new tokens, in one stride or several."""

    @property
    def stride(self) -> int | None:
        """The number of tokens of the next stride, at most; None without strides."""
        return None

    @property
    def waits_for_others(self) -> bool:
        """Whether `after_all_layers` has work after a decoded token."""
        return False

    # -- a step

    def expect(self, tokens: int) -> bool:
        """Announce `tokens` new tokens, in one step or several. Returns whether all blocks must be finalized again."""
        return False

    def begin_prefill(self, step: Step) -> None:
        """Begin a prefill: the tokens of a prompt follow in chunks."""

    def end_prefill(self, step: Step) -> Any:
        """Store the prompt, once all of it has arrived. Returns a value for the operator."""

    def leave_prefill(self) -> None:
        """Clean up after a prefill, successful or not."""

    @property
    @abstractmethod
    def is_prefilling(self) -> bool:
        """Whether this layer is in a prefill."""

    # -- rollback and fork

    def crop(self, length: int) -> None:
        """Drop the tokens from position `length` on; the group crops the sequences themselves.

        Raises HeteroKVError where that is impossible; `can_crop` predicts it.
        """

    #: Whether `crop` is possible.
    can_crop: bool = True

    def can_crop_to(self, length: int) -> bool:
        """Whether `crop(length)` is possible."""
        return self.can_crop

    def checkpoint(self) -> LayerCheckpoint | None:
        """A copy of the present state for a layer that cannot `crop`; None if its class cannot return to one."""
        return None

    def return_to(self, checkpoint: LayerCheckpoint) -> None:
        """Drop the tokens after a checkpoint of this layer, or of one that it was forked from."""
        raise HeteroKVError(f"layer {self.layer_idx} ({type(self).__name__}) cannot return to a checkpoint")

    def snapshot(self) -> Any:
        """The present state, for `rollback`."""
        return self.state

    def rollback(self, snapshot: Any) -> None:
        """Restore the state at `snapshot`; the sequences are already restored."""
        self.state = snapshot

    def fork(self, memo: dict[int, Any]) -> FamilyLayer:
        """A second layer with the same tokens; `memo` as for copy.deepcopy, one for all layers of a cache."""
        return copy.copy(self)

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Make row i the present row `rows[i]`: drops, reorders or duplicates rows (beam search)."""

    def reopen(self) -> None:
        """Make the next prompt repeat the choices that queries made of the blocks' contents."""

    # -- in a file

    def saved(self) -> SavedPart:
        """The data that `restore` needs beyond the blocks to continue exactly in another process.

        Raises ContextError when the layer's class does not implement it.
        """
        raise ContextError(
            f"layer {self.layer_idx} ({type(self).__name__}) cannot be saved: its class has no `saved` and `restore`; "
            "use another operator for that layer, or add both methods to its cache layer"
        )

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        """Restore an empty layer from `saved`'s data. The group has its sequences; the blocks are filled later.

        `part` comes from an untrusted file: everything read from it is checked.

        Raises DamagedContextError for data that `saved` cannot have written.
        """
        raise ContextError(f"layer {self.layer_idx} ({type(self).__name__}) cannot be restored from a file")

    def after_restore(self, part: SavedPart) -> None:
        """Finish `restore` once the blocks are filled."""

    # -- captured tokens

    @property
    def captured_memory(self) -> Any:
        """What owns the memory whose addresses a captured token's attention keeps: the store of the layer's group.

        None if attention cannot be captured; see `adapter.graph_recording.CapturableAttention`.
        """
        return None

    # -- memory and statistics

    @property
    def dram_bytes(self) -> int:
        """DRAM outside the blocks, bytes."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Memory on the compute device beyond `dram_bytes`, bytes."""
        return 0

    @property
    def tables_shared_with_others(self) -> Sequence[Any]:
        """Objects with `nbytes` that several layers share; the cache counts each once."""
        return ()

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """Statistics by name; per row, the mean over the group's rows."""
        return {}
