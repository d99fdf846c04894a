"""TOVA (Oren et al. 2024, arXiv:2401.06104): drops what the last query attends to least."""

from __future__ import annotations

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import TovaSettings
from hetero_kv.families.bounded.eviction.ranking import best


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
