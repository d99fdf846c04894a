"""H2O (Zhang et al. 2023, arXiv:2306.14048): heavy hitters by accumulated attention, and the newest tokens."""

from __future__ import annotations

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import H2OSettings
from hetero_kv.families.bounded.eviction.ranking import best


class H2O(EvictionPolicy[H2OSettings]):
    """Ranks entries by the attention received from all queries so far, summed over the group's heads (algorithm 1)."""

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        return entries.accumulated(received=attended.column_sums().sum(dim=2))

    def evict(self, entries: Entries, budget: int) -> Entries:
        recent = round(budget * self.settings.recent_ratio)
        return entries.kept(best(entries.score("received"), budget, last=recent))
