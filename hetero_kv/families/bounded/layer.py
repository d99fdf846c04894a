"""The cache of a bounded layer: entries of which a policy keeps a fixed number, whatever the sequence's length."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_ops.rotary import rotate
from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.engine.operator_layer import OperatorLayer
from hetero_kv.engine.statistics import Statistic, register
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded.entries import Entries, no_entries
from hetero_kv.families.bounded.entry_room import SLACK
from hetero_kv.families.bounded.eviction.policy import Attended, EvictionPolicy

ENTRIES_HELD = register(Statistic("entries_held", "entries", "entries per kv head that the eviction policy has kept"))


class BoundedLayer(OperatorLayer):
    """At most `budget` entries per kv head after every forward, of a sequence that may go on for ever.

    Entries are replaced and never changed, so that a checkpoint or a fork is a reference to them.

    Args:
        policy: decides which entries stay.

    Attributes:
        entries: None before the first token.
        length: tokens of the sequence so far, dropped ones included.
        budget: entries that stay; None before the first token.
        rotary: the rotation of positions 0 to the most entries that there were; None where positions are kept.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.rotary: RotaryTable | None = None
        self._coming = 0
        self._prefilling = False
        self._probed = False
        self._without_catalyst: Entries | None = None
        self._forget()

    def _forget(self) -> None:
        self.entries: Entries | None = None
        self.length = 0
        self.prompt_length = 0
        self.budget: int | None = None
        self.is_initialized = False

    # -- what transformers asks of a cache layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first tokens make the entries."""
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far, dropped ones included: the position of the next token."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the mask that `query_length` new tokens would need."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: a sequence may be of any length."""
        return -1

    def reset(self) -> None:
        """Forget every token."""
        self._forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i continue row `beam_idx[i]` (beam search)."""
        if self.entries is not None:
            self.entries = self.entries.selected(beam_idx)

    # -- sizes

    @property
    def held(self) -> int:
        """Entries per kv head."""
        return 0 if self.entries is None else self.entries.held

    @property
    def dram_bytes(self) -> int:
        """Memory of entries that are computed with on the CPU, bytes."""
        return self.entries.nbytes if self.entries is not None and self.entries.keys.device.type == "cpu" else 0

    @property
    def device_bytes(self) -> int:
        """Memory of entries that are elsewhere, bytes."""
        return 0 if self.entries is None else self.entries.nbytes - self.dram_bytes

    def require_room(self, tokens: int) -> None:
        """A bounded layer has room for any number of tokens."""

    def require_batch(self, batch: int) -> None:
        """Raise HeteroKVError when the layer holds another number of sequences than `batch`."""
        rows = batch if self.entries is None else self.entries.keys.shape[0]
        if rows != batch:
            raise HeteroKVError(
                f"the cache holds {rows} sequences and was given {batch}; use a HeteroCache for each batch, or "
                "cache.reset() between them"
            )

    def begin(self, tokens: int) -> None:
        """`tokens` new tokens are about to come, in one stride or several."""
        if tokens > 1 or self.budget is None:
            self.prompt_length = self.length + tokens
            self.budget = self.policy.budget_for(self.prompt_length)
        if tokens > 1 and self.entries is not None:
            self.entries = self.policy.begin_turn(self.entries)

    @property
    def stride(self) -> int | None:
        """Tokens that may pass through all layers next; None without strides."""
        assert self.budget is not None
        return self.policy.stride(self.held, self.budget)

    # -- new tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether a `prefill` context is open."""
        return self._prefilling

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Within this context `tokens` new tokens arrive (`extend`); when it ends well entries are dropped."""
        self._coming, self._prefilling = tokens, True
        try:
            yield
            if not self.policy.settles_late and not self._probed:
                self.settle(tokens)
        finally:
            self._coming, self._prefilling = 0, False
            if tokens > 1:
                self._forget_placed()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens behind the entries.

        Args:
            keys: [batch, kv_heads, tokens, k_dim], before rotation where the policy re-indexes positions.
            values: [batch, kv_heads, tokens, v_dim].

        Returns keys, rotated, and values of all entries, as views: [batch, kv_heads, held, dim].
        """
        entries = no_entries(keys, values) if self.entries is None else self.entries
        new = keys.shape[2]
        held = entries.held
        # Of a prompt all tokens to come, of what is decoded one at a time some more.
        roomy = entries.with_room(new, max(self._coming - new, SLACK if self._coming == 1 else 0))
        if roomy is not entries:
            self._forget_placed()
        self.entries = roomy.grown(keys, values, self.length)
        self.length += new
        self._coming -= new
        return self._placed_keys(self.entries, held), self.entries.values

    def _placed_keys(self, entries: Entries, held: int) -> torch.Tensor:
        """The keys as they are attended to, of which those before `held` may have been before: a view."""
        room = entries.room
        if self.rotary is None or room is None:
            return entries.keys
        if room.placed is None:
            room.placed, held = torch.empty_like(room.keys), 0
        room.placed[:, :, held : entries.held] = self.placed(entries.keys[:, :, held:], held)
        return room.placed[:, :, : entries.held]

    def _forget_placed(self) -> None:
        """Give back the memory of the placed keys, which all layers would have at once, in what undoing comes back to
        too. Tokens that are decoded while the budget is not full find them again."""
        if self.entries is not None and self.entries.room is not None:
            self.entries.room.placed = None

    def placed(self, vectors: torch.Tensor, start: int) -> torch.Tensor:
        """Queries or keys [batch, heads, n, k_dim] as they are at the places from `start` on, in their dtype.

        They are those that the attention received where the policy keeps positions.
        """
        if self.rotary is None:
            return vectors
        places = slice(start, start + vectors.shape[2])
        cos, sin = self.rotary.cos[places], self.rotary.sin[places]
        return rotate(vectors, cos, sin, self.rotary.rotation.layout).to(vectors.dtype)

    def observe(self, attended: Attended) -> None:
        """Let the policy see what the tokens added last attended to."""
        assert self.entries is not None
        if self._probed:
            assert self._without_catalyst is not None
            self._without_catalyst = self.policy.observe_catalyst(self._without_catalyst, attended)
        else:
            self.entries = self.policy.observe(self.entries, attended)

    # -- dropping entries

    @property
    def is_due(self) -> bool:
        """Whether entries are to be dropped now."""
        return self.entries is not None and self.budget is not None and self.policy.is_due(self.held, self.budget)

    def score_tokens(self, scores: torch.Tensor) -> None:
        """Note a score of the newest tokens, [batch, tokens], as "token", for all kv heads."""
        assert self.entries is not None
        noted = self.entries.score("token").clone()
        noted[..., noted.shape[2] - scores.shape[1] :] = scores[:, None]
        self.entries = self.entries.scored(token=noted)

    def settle(self, tokens: int) -> None:
        """Drop entries if that is due, when `tokens` new ones have passed."""
        if self.entries is None:
            return
        if tokens > 1:
            self.entries = self.policy.end_of_prompt(self.entries)
        if self.is_due:
            assert self.budget is not None
            self._forget_placed()
            self.entries = self.policy.evict(self.entries, self.budget)
            if self.held > self.budget:
                raise HeteroKVError(
                    f"policy {self.policy.settings.policy} left {self.held} entries where the budget is {self.budget}; "
                    "its evict must return at most that many"
                )

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Within this context tokens attend and are shown to `observe_catalyst`, and are gone when it ends."""
        assert self.entries is not None
        length, self._without_catalyst, self._probed = self.length, self.entries, True
        try:
            yield
        finally:
            self._probed = False
            self.entries, self.length, self._without_catalyst = self._without_catalyst, length, None

    # -- going back, and going two ways

    def checkpoint(self) -> tuple[Any, ...]:
        """What `restore` needs to come back to the present state."""
        return self.entries, self.length, self.prompt_length, self.budget

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Come back to the state at `checkpoint`."""
        self.entries, self.length, self.prompt_length, self.budget = checkpoint

    def fork(self, memo: dict[int, Any]) -> BoundedLayer:
        """A second layer with the same entries, which both hold until one of them drops some."""
        twin = copy.copy(self)
        twin.rotary = copy.deepcopy(self.rotary, memo)
        return twin

    # -- what others ask

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """See OperatorLayer."""
        return {ENTRIES_HELD.name: self.held}
