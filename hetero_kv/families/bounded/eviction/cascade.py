"""Cascading KV cache (Willette et al. 2024, arXiv:2406.17808): sub-caches that keep older tokens ever more sparsely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import CascadeSettings
from hetero_kv.families.bounded.eviction.sub_caches import sub_cache_sizes, survivors


@dataclass(frozen=True)
class _SeenTokens:
    """Number of the sequence's tokens that the layer has seen, equal in all rows."""

    tokens: int = 0

    def selected(self, rows: torch.Tensor) -> _SeenTokens:
        return self


class Cascade(EvictionPolicy[CascadeSettings]):
    """Ranks competing entries by the moving average of their attention, maximum over the group's heads (section 3.1).

    The tokens in the cache span (window / sub_caches) · (2^sub_caches - 1) of the sequence (equation 4), where the
    window is the budget without the sinks.
    """

    strided = True
    reindexed = True

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        seen: _SeenTokens = entries.carried.get("seen", _SeenTokens())
        entries = entries.carrying(seen=_SeenTokens(seen.tokens + attended.tokens))
        if self.settings.sub_caches == 1:
            return entries
        gamma = self.settings.gamma
        later = torch.arange(attended.tokens - 1, -1, -1, device=attended.q.device, dtype=torch.float64)
        received = attended.column_sums(weights=((1 - gamma) * gamma**later).float(), group_max=True)
        return entries.scored(average=entries.score("average") * gamma**attended.tokens + received[:, :, 0])

    def saved_memory(self, name: str, value: Any) -> dict[str, int] | None:
        return {"tokens": value.tokens} if isinstance(value, _SeenTokens) else None

    def restored_memory(self, name: str, numbers: Mapping[str, int]) -> Any:
        is_sound = name == "seen" and numbers.keys() == {"tokens"} and numbers["tokens"] >= 0
        return _SeenTokens(numbers["tokens"]) if is_sound else None

    def evict(self, entries: Entries, budget: int) -> Entries:
        sinks, seen = self.settings.sink_tokens, entries.carried["seen"].tokens
        sizes = sub_cache_sizes(budget - sinks, self.settings.sub_caches)
        incoming = entries.num_entries - budget
        return entries.kept(survivors(entries.score("average"), sizes, sinks, seen - sinks - incoming))
