"""H2O (Zhang et al. 2023, arXiv:2306.14048): heavy hitters by accumulated attention, and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import WholePromptSettings, policy_setting
from hetero_kv.settings.setting import setting


@dataclass(frozen=True)
class H2OSettings(WholePromptSettings):
    """H2O: heavy hitters and the newest tokens."""

    policy: str = policy_setting("h2o")
    recent_ratio: float = setting(0.5, "share of the budget for the newest tokens", minimum=0, maximum=1)


@register("h2o", meaning="the highest accumulated attention, and the newest tokens", settings=H2OSettings)
class H2O(EvictionPolicy[H2OSettings]):
    """Ranks entries by the attention received from all queries so far, summed over the group's heads (algorithm 1)."""

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        return entries.accumulated(received=attended.column_sums().sum(dim=2))

    def evict(self, entries: Entries, budget: int) -> Entries:
        recent = round(budget * self.settings.recent_ratio)
        return entries.kept(best(entries.score("received"), budget, last=recent))
