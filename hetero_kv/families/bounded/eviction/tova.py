"""TOVA (Oren et al. 2024, arXiv:2401.06104): drops what the last query attends to least."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import StridedSettings, policy_setting


@dataclass(frozen=True)
class TovaSettings(StridedSettings):
    """TOVA: what the last query attends to."""

    policy: str = policy_setting("tova")


@register(
    "tova", meaning="the entries that the last query attends to most, one set for all heads", settings=TovaSettings
)
class Tova(EvictionPolicy[TovaSettings]):
    """Ranks entries by the attention of the newest query, averaged over all heads of the layer (section 4)."""

    strided = True

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        shared = attended.column_sums(last=1).mean(dim=(1, 2))
        return entries.scored(last=shared[:, None].expand(-1, attended.keys.shape[1], -1))

    def evict(self, entries: Entries, budget: int) -> Entries:
        index = best(entries.score("last")[:, :1], budget)
        # The next query ranks all entries again.
        return entries.without_score("last").kept(index)
