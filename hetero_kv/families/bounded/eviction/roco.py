"""RoCo (Ren & Zhu 2024, arXiv:2402.06262): mean attention; unevenly attended entries are never evicted."""

from __future__ import annotations

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import RoCoSettings
from hetero_kv.families.bounded.eviction.ranking import best, seen_by


class RoCo(EvictionPolicy[RoCoSettings]):
    """Ranks entries by the mean attention of the queries that saw them; those of highest standard deviation are
    protected. The heads of a group count as additional queries."""

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        sums, squares = attended.column_sums(), attended.column_sums(squared=True)
        received = sums.sum(dim=2)
        queries = seen_by(received, attended.tokens, sums.shape[2])
        return entries.accumulated(received=received, squared=squares.sum(dim=2), queries=queries)

    def evict(self, entries: Entries, budget: int) -> Entries:
        queries = entries.score("queries")
        mean = entries.score("received") / queries
        variance = entries.score("squared") / queries - mean.square()
        recent = self.settings.recent_tokens
        out_of_scope = max(recent, round(budget * self.settings.protected_ratio))
        uneven = best(variance, out_of_scope, last=recent)
        return entries.kept(best(mean.scatter(-1, uneven, float("inf")), budget))
