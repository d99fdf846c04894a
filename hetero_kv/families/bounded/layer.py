"""The cache layer of bounded attention: a policy keeps a fixed number of entries, whatever the sequence's length."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.statistics import NO_NUMBERS, READ_BYTES, Statistic, register
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded import saving
from hetero_kv.families.bounded.entries import Entries, no_entries
from hetero_kv.families.bounded.entry_buffer import SLACK
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.joint_eviction import evict_jointly
from hetero_kv.families.bounded.reindexed_positions import rotate_arrays, rotate_tensors

CACHED_ENTRIES = register(
    Statistic("cached_entries", "entries", "entries per kv head that the eviction policy has kept")
)


class BoundedLayer(FamilyLayer):
    """At most `budget` entries per kv head after every forward, for sequences of any length.

    Entries are replaced and never changed, so a checkpoint or a fork is a reference to them.

    Args:
        policy: decides which entries stay.

    Attributes:
        entries: None before the first token.
        length: tokens of the sequence so far, evicted ones included.
        budget: number of entries that stay; None before the first token.
        coming: tokens of the present step that have not arrived yet.
        rotary: the rotations of all positions in the cache; None if the policy does not re-index positions.
    """

    is_strided = True
    after_all_layers = staticmethod(evict_jointly)
    can_crop = False

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.rotary: RotaryTable | None = None
        self.coming = self._step_tokens = 0
        self._probed = False
        self._without_catalyst: Entries | None = None
        self._forget()

    def _forget(self) -> None:
        self.entries: Entries | None = None
        self.length = 0
        self.prompt_length = 0
        self.budget: int | None = None
        self.read = NO_NUMBERS
        self.is_initialized = False

    # -- transformers' interface of a cache layer

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far, evicted ones included: the position of the next token."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the mask for `query_length` new tokens."""
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget every token."""
        self._forget()

    def select(self, rows: Rows[int]) -> None:
        if self.entries is not None:
            self.entries = self.entries.selected(torch.tensor(rows))

    # -- sizes

    @property
    def num_entries(self) -> int:
        """Number of entries per kv head."""
        return 0 if self.entries is None else self.entries.num_entries

    @property
    def dram_bytes(self) -> int:
        """Memory of entries on the CPU, bytes."""
        return self.entries.nbytes if self.entries is not None and self.entries.keys.device.type == "cpu" else 0

    @property
    def device_bytes(self) -> int:
        """Memory of entries on other devices, bytes."""
        return 0 if self.entries is None else self.entries.nbytes - self.dram_bytes

    def begin_turn(self, tokens: int) -> None:
        """Prepare for `tokens` new tokens, which arrive in one stride or several."""
        if tokens > 1 or self.budget is None:
            self.prompt_length = self.length + tokens
            self.budget = self.policy.budget_for(self.prompt_length)
        if tokens > 1 and self.entries is not None:
            self.entries = self.policy.begin_turn(self.entries)

    @property
    def stride(self) -> int | None:
        """Number of tokens that may pass all layers next; None without strides."""
        assert self.budget is not None
        return self.policy.stride(self.num_entries, self.budget)

    @property
    def waits_for_others(self) -> bool:
        return self.policy.evicts_after_all_layers

    # -- new tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether this layer is prefilling a prompt."""
        return self._step_tokens > 0

    def begin_prefill(self, step: Step) -> None:
        """Prepare for the tokens of `step`, which then arrive (`extend`)."""
        self.coming = self._step_tokens = step.tokens

    def end_prefill(self, step: Step) -> None:
        """Evict entries, unless the policy waits for the other layers."""
        if not self.policy.evicts_after_all_layers and not self._probed:
            self.evict_if_due(step.tokens)

    def leave_prefill(self) -> None:
        passed, self.coming, self._step_tokens = self._step_tokens, 0, 0
        if passed > 1:
            self._release_rotated_keys()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to the entries.

        Args:
            keys: [batch, kv_heads, tokens, k_dim], before rotation where the policy re-indexes positions.
            values: [batch, kv_heads, tokens, v_dim].

        Returns rotated keys and values of all entries, as views: [batch, kv_heads, cached, dim].
        """
        entries = no_entries(keys, values) if self.entries is None else self.entries
        new = keys.shape[2]
        cached = entries.num_entries
        # Capacity for all coming tokens of a prompt, or for SLACK more tokens of decode.
        roomy = entries.with_room(new, max(self.coming - new, SLACK if self.coming == 1 else 0))
        if roomy is not entries:
            self._release_rotated_keys()
        self.entries = grown = roomy.grown(keys, values, self.length)
        self.length += new
        self.coming -= new
        return self._rotated_keys(grown, cached), grown.values

    def _rotated_keys(self, entries: Entries, cached: int) -> torch.Tensor:
        """A view of the keys as attention reads them. Those before `cached` may be rotated already."""
        room = entries.room
        if self.rotary is None:
            return entries.keys
        if room.rotated_keys is None:
            room.rotated_keys, cached = torch.empty_like(room.keys), 0
        if self.rotary.arrays is not None and room.keys.dtype == torch.float32:
            assert room.arrays is not None
            rotate_arrays(self.rotary, room.arrays[0], room.rotated_keys, (cached, entries.num_entries), cached)
        else:
            rotated = room.rotated_keys[:, :, cached : entries.num_entries]
            rotate_tensors(self.rotary, entries.keys[:, :, cached:], cached, rotated)
        return room.rotated_keys[:, :, : entries.num_entries]

    @property
    def key_array(self) -> np.ndarray | None:
        """[batch, kv_heads, capacity, k_dim], beginning with the keys that `extend` returned; None if they are not
        float32, or not on the CPU."""
        room = self.entries.room if self.entries is not None else None
        if room is None or room.arrays is None or room.keys.dtype != torch.float32:
            return None
        if self.rotary is None:
            return room.arrays[0]
        return None if room.rotated_keys is None else room.rotated_keys.numpy()

    def _release_rotated_keys(self) -> None:
        """Free the rotated keys, which all layers would have at once, also in checkpoints. Decode before the budget is
        full keeps them from token to token."""
        if self.entries is not None:
            self.entries.room.rotated_keys = None

    def rotated(self, vectors: torch.Tensor, start: int) -> torch.Tensor:
        """Queries or keys [batch, heads, n, k_dim], rotated to the cache positions from `start` on, in their dtype.

        Returned unchanged if the policy keeps positions.
        """
        if self.rotary is None:
            return vectors
        if vectors.shape[2] == 1 and vectors.dtype == torch.float32 and self.rotary.arrays is not None:
            rotated = torch.empty(vectors.shape)
            rotate_arrays(self.rotary, vectors.numpy(), rotated, (0, 1), start)
        else:
            rotated = torch.empty_like(vectors)
            rotate_tensors(self.rotary, vectors, start, rotated)
        return rotated

    def observe(self, attended: ObservedAttention) -> None:
        """Pass to the policy what the newest tokens attended to."""
        assert self.entries is not None
        if self._probed:
            assert self._without_catalyst is not None
            self._without_catalyst = self.policy.observe_catalyst(self._without_catalyst, attended)
        else:
            self.entries = self.policy.observe(self.entries, attended)

    # -- dropping entries

    @property
    def is_due(self) -> bool:
        """Whether entries must be evicted now."""
        return (
            self.entries is not None and self.budget is not None and self.policy.is_due(self.num_entries, self.budget)
        )

    def score_tokens(self, scores: torch.Tensor) -> None:
        """Record a score of the newest tokens, [batch, tokens], as "token", for all kv heads."""
        assert self.entries is not None
        recorded = self.entries.score("token").clone()
        recorded[..., recorded.shape[2] - scores.shape[1] :] = scores[:, None]
        self.entries = self.entries.scored(token=recorded)

    def evict_if_due(self, tokens: int) -> None:
        """Evict entries if that is due, after `tokens` new ones."""
        if self.entries is None:
            return
        if tokens > 1:
            self.entries = self.policy.end_of_prompt(self.entries)
        if self.is_due:
            assert self.budget is not None
            self._release_rotated_keys()
            self.entries = self.policy.evict(self.entries, self.budget)
            if self.num_entries > self.budget:
                raise HeteroKVError(
                    f"policy {self.policy.settings.policy} left {self.num_entries} entries, but the budget is "
                    f"{self.budget}; its evict must return at most that many"
                )

    @contextmanager
    def probing(self) -> Iterator[None]:
        """A context in which tokens attend and are passed to `observe_catalyst`; they are removed when it ends."""
        assert self.entries is not None
        length, self._without_catalyst, self._probed = self.length, self.entries, True
        try:
            yield
        finally:
            self._probed = False
            self.entries, self.length, self._without_catalyst = self._without_catalyst, length, None

    # -- checkpoints and forks

    def snapshot(self) -> tuple[Any, ...]:
        return self.entries, self.length, self.prompt_length, self.budget, self.read

    def rollback(self, snapshot: tuple[Any, ...]) -> None:
        self.entries, self.length, self.prompt_length, self.budget, self.read = snapshot
        self._probed, self._without_catalyst = False, None

    def fork(self, memo: dict[int, Any]) -> BoundedLayer:
        """See FamilyLayer; both layers share the entries until one of them evicts."""
        forked = copy.copy(self)
        forked.rotary = copy.deepcopy(self.rotary, memo)
        return forked

    def saved(self) -> SavedPart:
        return saving.saved(self)

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        saving.restore(self, part, target)

    @property
    def tables_shared_with_others(self) -> tuple[Any, ...]:
        """The rotation of every position; see FamilyLayer."""
        return () if self.rotary is None else (self.rotary,)

    @property
    def statistics(self) -> dict[str, float | int | None]:
        return {CACHED_ENTRIES.name: self.num_entries, READ_BYTES.name: self.read.mean}
