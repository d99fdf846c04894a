"""What an eviction policy is.

A policy is one file in this package: a dataclass of settings, and a class with the decorator `register`. The operator
stores tokens, computes attention and positions, and cuts prompts; the policy is asked at these points:

0. When a prompt comes behind cached entries: `begin_turn`.
1. After the attention of every chunk, or of one decoded token: `observe` gets the entries, the new ones last, and what
   the chunk's queries attended to. It returns the entries with new scores (`Entries.scored`) or memories (`carrying`).
2. With `needs_logits`, once the chunk has passed through all layers: `token_scores` turns logits into one number per
   new token, which the entries then have as their score "token".
3. With a `catalyst_text`, when entries are to be dropped: its tokens run through the model behind the entries, every
   layer's `observe_catalyst` sees what they attended to, and nothing else remains of them.
4. With `allocates`, when a whole prompt has passed through all layers: `allocate` sees all layers and says how many
   entries each may keep.
5. When a prompt (of one chunk or more, or a stride of it) has passed through the layer: `end_of_prompt`.
6. When `is_due` (there are more entries than the budget): `evict` returns those that stay (`Entries.kept`), which may
   be changed: `entries.with_vectors(keys, values)`.

Strided prefill cuts a prompt into strides that each pass through 1-6 in all layers; full prefill takes the whole prompt
as one. A policy has no state of its own: what it remembers is in the entries, so that undoing a turn, forks and beams
are right without its help.

    @dataclass(frozen=True)
    class NewestSettings(StridedSettings):
        policy: str = policy_setting("newest")

    @register("newest", meaning="the newest entries", settings=NewestSettings)
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

from cpu_ops.cached_entries import received_attention
from gpu_ops.column_sums import column_sums
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.entry_room import kernel_threads
from hetero_kv.families.bounded.eviction.settings import BoundedSettings, StridedSettings

S = TypeVar("S", bound=BoundedSettings)


@dataclass(frozen=True)
class Attended:
    """What a chunk's queries attended to in one layer.

    Attributes:
        q: [batch, kv_heads * group, n, k_dim], as the attention took them.
        lse: [batch, kv_heads * group, n] float32, the log-sum-exp of each query's scores, a learned sink included.
        keys: [batch, kv_heads, length, k_dim], as the attention took them; the last n are the queries' own tokens.
        scale, softcap: of the scores.
        key_array: [batch, kv_heads, capacity, k_dim] float32, of which `keys` are the beginning; None where kernels do
            not reach them.
        question: how many of the prompt's last tokens ask what comes before; None where nobody says.
        is_decoded: whether the query is of a token that was decoded, and not of a prompt or a part of one.
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
        """Queries of the chunk, n."""
        return self.q.shape[2]

    def column_sums(
        self,
        last: int | None = None,
        weights: torch.Tensor | None = None,
        squared: bool = False,
        group_max: bool = False,
    ) -> torch.Tensor:
        """The attention that every key received from the chunk, per query head; computed when it is asked for.

        Args:
            last: only of the chunk's last so many queries.
            weights: [queries], a factor for each query; None for 1.
            squared: of squared probabilities.
            group_max: of the highest among a group's heads, for each query.

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
        """`column_sums` of one query, by a kernel."""
        batch, heads, _, dim = self.q.shape
        kv_heads, length = self.keys.shape[1], self.keys.shape[2]
        q, lse = self.q.numpy(), self.lse.numpy()
        shape = batch, kv_heads, heads // kv_heads
        arrays = q.reshape(*shape, dim), lse.reshape(shape), array, length
        return torch.from_numpy(received_attention(*arrays, self.scale, self.softcap or 0.0, kernel_threads()))


class EvictionPolicy(ABC, Generic[S]):
    """Decides which entries of a layer stay. See the module's docstring for when it is asked what.

    Args:
        settings: the policy's own.
        layer_idx: the layer that it serves.
        num_layers: of the model.

    Attributes:
        rank, ranks: the layer's rank among the layers of the same settings, and how many these are; where nobody says
            so, the model's. A model may have other operators in some layers.
    """

    #: Whether prompts are cut into strides; else a prompt is prefilled with full attention and compressed then.
    strided: bool = False
    #: Whether keys are kept before rotation, and rotated to positions 0, 1, … within the cache when attended to.
    reindexed: bool = False
    #: Whether `token_scores` is to be asked.
    needs_logits: bool = False
    #: Whether `allocate` is to be asked.
    allocates: bool = False

    def __init__(self, settings: S, layer_idx: int, num_layers: int) -> None:
        self.settings = settings
        self.layer_idx = layer_idx
        self.num_layers = num_layers
        self.rank, self.ranks = layer_idx, num_layers

    # -- sizes

    def budget_for(self, prompt_length: int) -> int:
        """Entries that this layer keeps when its sequence was `prompt_length` tokens long at the last prompt's end."""
        budget = self.settings.budget
        if isinstance(budget, float):
            return max(self.settings.least, math.ceil(budget * prompt_length))
        return budget

    def stride(self, cached: int, budget: int) -> int | None:
        """Tokens that may pass through all layers next, when there are `cached` entries; None without strides."""
        if not self.strided:
            return None
        assert isinstance(self.settings, StridedSettings)
        return self.settings.stride

    @property
    def most_entries(self) -> int | None:
        """Entries that are there at most while a stride is attended to; None where it depends on the prompt."""
        budget = self.settings.budget
        if isinstance(budget, float) or not self.strided:
            return None
        assert isinstance(self.settings, StridedSettings)
        return budget + self.settings.stride

    def is_due(self, cached: int, budget: int) -> bool:
        """Whether entries are to be dropped now."""
        return cached > budget

    # -- what it sees

    def begin_turn(self, entries: Entries) -> Entries:
        """The entries when a prompt behind them is about to come, before its first stride."""
        return entries

    def observe(self, entries: Entries, attended: Attended) -> Entries:
        """The entries with what `attended` says of them. `entries` and `attended.keys` are in the same order."""
        return entries

    def token_scores(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """One number per token.

        Args:
            logits: [batch, n, vocab] float32, from which each token was predicted (those of the token before it).
            tokens: [batch, n] int64.

        Returns [batch, n] float32. The first token of a sequence, which nothing predicts, gets infinity unasked.
        """
        raise NotImplementedError(f"{type(self).__name__} has needs_logits and no token_scores")

    def catalyst_text(self) -> str | None:
        """The prompt that is run behind the entries before some are dropped; None for no catalyst."""
        return None

    def observe_catalyst(self, entries: Entries, attended: Attended) -> Entries:
        """The entries with what the catalyst says of them.

        `attended.keys` are the entries' and behind them the catalyst's so far; asked once per chunk of the catalyst.
        """
        return entries

    # -- what it decides

    def allocate(self, layers: Sequence[Entries], budgets: Sequence[int]) -> Sequence[int]:
        """How many entries each layer keeps until the next prompt, from those of all layers and their `budget_for`.

        Asked of one policy for all layers of its settings.
        """
        return budgets

    def end_of_prompt(self, entries: Entries) -> Entries:
        """The entries when more than one token has passed through the layer, before any are dropped."""
        return entries

    @abstractmethod
    def evict(self, entries: Entries, budget: int) -> Entries:
        """The entries that stay, at most `budget`, in order. Asked when `is_due`."""

    # -- in a file

    def saved_memory(self, name: str, value: Any) -> dict[str, int] | None:
        """What `entries.carried` has under `name`, no tensor, as whole numbers; None where it cannot be said so."""
        return None

    def restored_memory(self, name: str, numbers: Mapping[str, int]) -> Any:
        """What `saved_memory` told, from a file that anybody may have written; None where it cannot have told that."""
        return None

    @property
    def evicts_after_all_layers(self) -> bool:
        """Whether it must wait until a chunk has passed through all layers before entries are dropped."""
        return self.needs_logits or self.allocates or self.catalyst_text() is not None
