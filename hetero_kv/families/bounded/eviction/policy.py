"""The interface of eviction policies.

A policy is a class in a file of this package, and a dataclass of settings with the decorator `register` in
`policy_settings`, which imports no torch. The operator stores tokens, computes attention and positions, and splits
prompts. It calls the policy at these points:

0. When a prompt follows cached entries: `begin_turn`.
1. After the attention of every chunk, or of one decoded token: `observe` receives the entries, the new ones last, and
   what the chunk's queries attended to. It returns the entries with new scores (`Entries.scored`) or state
   (`carrying`).
2. With `needs_logits`, once the chunk has passed all layers: `token_scores` turns logits into one number per new token,
   which becomes the entries' score "token".
3. With a `catalyst_text`, when entries must be evicted: its tokens run through the model after the entries. Every
   layer's `observe_catalyst` receives what they attended to; then they are removed.
4. With `allocates`, when a whole prompt has passed all layers: `allocate` receives the entries of all layers
   and returns how many each may keep.
5. When a prompt (of one chunk or more, or a stride of it) has passed the layer: `end_of_prompt`.
6. When `is_due` (there are more entries than the budget): `evict` returns those that stay (`Entries.kept`), and may
   change them: `entries.with_vectors(keys, values)`.

Strided prefill splits a prompt into strides that each pass through 1-6 in all layers; full prefill treats the whole
prompt as one. A policy has no state: its memory is in the entries, so rollbacks, forks and beams are correct without
its help.

    @register("newest", meaning="the newest entries", implementation=f"{__package__}.newest.Newest")
    @dataclass(frozen=True)
    class NewestSettings(StridedSettings):
        policy: str = policy_setting("newest")

    class Newest(EvictionPolicy[NewestSettings]):
        strided = True

        def evict(self, entries: Entries, budget: int) -> Entries:
            return entries.kept(best(entries.positions, budget))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from hetero_kv.cpu_ops.cached_entries import received_attention
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.entry_buffer import kernel_threads
from hetero_kv.families.bounded.eviction.settings import BoundedSettings, StridedSettings
from hetero_kv.gpu_ops.column_sums import column_sums

S = TypeVar("S", bound=BoundedSettings)


@dataclass(frozen=True)
class ObservedAttention:
    """What a chunk's queries attended to in one layer.

    Attributes:
        q: [batch, kv_heads * group, n, k_dim], as attention used them.
        lse: [batch, kv_heads * group, n] float32, the log-sum-exp of each query's scores, a learned sink included.
        keys: [batch, kv_heads, length, k_dim], as attention used them; the last n are the queries' own tokens.
        scale, softcap: scaling and capping of the scores.
        key_array: [batch, kv_heads, capacity, k_dim] float32, which begins with `keys`; None if kernels cannot access
            them.
        question: number of the prompt's last tokens that are its question; None if unknown.
        is_decoded: whether the query belongs to a decoded token, rather than to a prompt.
    """

    q: torch.Tensor
    lse: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None
    key_array: np.ndarray | None = None
    question: int | None = None
    is_decoded: bool = False

    @property
    def tokens(self) -> int:
        """Number of queries of the chunk, n."""
        return self.q.shape[2]

    def column_sums(
        self,
        last: int | None = None,
        weights: torch.Tensor | None = None,
        squared: bool = False,
        group_max: bool = False,
    ) -> torch.Tensor:
        """The attention that every key received from the chunk, per query head; computed at each call.

        Args:
            last: use only this many of the chunk's last queries; None for all.
            weights: [queries], a factor for each query; None for 1.
            squared: sum squared probabilities.
            group_max: take the maximum over a group's heads, for each query.

        Returns [batch, kv_heads, group or 1 with group_max, length] float32.
        """
        if self.key_array is not None and self.tokens == 1 and self.q.dtype == torch.float32:
            received = self._received(self.key_array)
            if group_max:
                received = received.amax(dim=2, keepdim=True)
            if squared:
                received = received.square_()
            return received if weights is None else received * weights[-1]
        first = 0 if last is None else max(0, self.tokens - last)
        return column_sums(
            self.q[:, :, first:],
            self.lse[:, :, first:],
            self.keys,
            self.scale,
            self.softcap,
            weights,
            squared,
            group_max,
        )

    def _received(self, array: np.ndarray) -> torch.Tensor:
        """`column_sums` of one query, computed by a kernel."""
        batch, heads, _, dim = self.q.shape
        kv_heads, length = self.keys.shape[1], self.keys.shape[2]
        q, lse = self.q.numpy(), self.lse.numpy()
        shape = batch, kv_heads, heads // kv_heads
        arrays = q.reshape(*shape, dim), lse.reshape(shape), array, length
        return torch.from_numpy(received_attention(*arrays, self.scale, self.softcap or 0.0, kernel_threads()))


class EvictionPolicy(ABC, Generic[S]):
    """Decides which entries of a layer stay. The module's docstring says when each method is called.

    Args:
        settings: the policy's settings.
        layer_idx: the layer that it serves.
        num_layers: number of the model's layers.

    Attributes:
        rank, ranks: the layer's rank among the layers of the same settings, and their number; the layer's index and the
            model's number of layers until `configure_policies` sets them.
    """

    #: Whether prompts are split into strides; if not, a prompt is prefilled with full attention and then compressed.
    strided: bool = False
    #: Whether keys are kept before rotation, and rotated to positions 0, 1, … in the cache for attention.
    reindexed: bool = False
    #: Whether to call `token_scores`.
    needs_logits: bool = False
    #: Whether to call `allocate`.
    allocates: bool = False

    def __init__(self, settings: S, layer_idx: int, num_layers: int) -> None:
        self.settings = settings
        self.layer_idx = layer_idx
        self.num_layers = num_layers
        self.rank, self.ranks = layer_idx, num_layers

    # -- sizes

    def budget_for(self, prompt_length: int) -> int:
        """Number of entries that this layer keeps after a prompt that ended at `prompt_length` tokens."""
        budget = self.settings.budget
        if isinstance(budget, float):
            return max(self.settings.min_budget, math.ceil(budget * prompt_length))
        return budget

    def stride(self, cached: int, budget: int) -> int | None:
        """Number of tokens that may pass all layers next, after `cached` entries; None without strides."""
        if not self.strided:
            return None
        assert isinstance(self.settings, StridedSettings)
        return self.settings.stride

    @property
    def most_entries(self) -> int | None:
        """Largest number of entries while a stride is attended to; None if it depends on the prompt."""
        budget = self.settings.budget
        if isinstance(budget, float) or not self.strided:
            return None
        assert isinstance(self.settings, StridedSettings)
        return budget + self.settings.stride

    def is_due(self, cached: int, budget: int) -> bool:
        """Whether entries must be evicted now."""
        return cached > budget

    # -- inputs

    def begin_turn(self, entries: Entries) -> Entries:
        """Returns the entries before the first stride of a prompt that follows them."""
        return entries

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        """Returns the entries updated by `attended`. `entries` and `attended.keys` are in the same order."""
        return entries

    def token_scores(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns one number per token.

        Args:
            logits: [batch, n, vocab] float32, from which each token was predicted (those of the previous token).
            tokens: [batch, n] int64.

        Returns [batch, n] float32. The caller gives a sequence's first token, which nothing predicts, infinity.
        """
        raise NotImplementedError(f"{type(self).__name__} has needs_logits and no token_scores")

    def catalyst_text(self) -> str | None:
        """The text that runs after the entries before an eviction; None for no catalyst."""
        return None

    def observe_catalyst(self, entries: Entries, attended: ObservedAttention) -> Entries:
        """Returns the entries updated by what the catalyst attended to.

        `attended.keys` are those of the entries, then of the catalyst's tokens so far. Called once per catalyst chunk.
        """
        return entries

    # -- decisions

    def allocate(self, layers: Sequence[Entries], budgets: Sequence[int]) -> Sequence[int]:
        """Number of entries that each layer keeps until the next prompt, from all layers' entries and budgets.

        Called on one policy for all layers of its settings.
        """
        return budgets

    def end_of_prompt(self, entries: Entries) -> Entries:
        """Returns the entries after more than one token has passed the layer, before any eviction."""
        return entries

    @abstractmethod
    def evict(self, entries: Entries, budget: int) -> Entries:
        """Returns the entries that stay, at most `budget`, in order. Called when `is_due`."""

    # -- saved contexts

    def saved_memory(self, name: str, value: Any) -> dict[str, int] | None:
        """The object `value` of `entries.carried`, which is no tensor, as whole numbers; None if that is impossible."""
        return None

    def restored_memory(self, name: str, numbers: Mapping[str, int]) -> Any:
        """The object that `saved_memory` encoded, from an untrusted file; None if the numbers are invalid."""
        return None

    @property
    def evicts_after_all_layers(self) -> bool:
        """Whether eviction waits until a chunk has passed all layers."""
        return self.needs_logits or self.allocates or self.catalyst_text() is not None
