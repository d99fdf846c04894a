"""CaM (Zhang et al., ICML 2024): heavy hitters; values of evicted entries are merged into the newest entries."""

from __future__ import annotations

import torch

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import CaMSettings
from hetero_kv.families.bounded.eviction.ranking import best, others, seen_by
from hetero_kv.gpu_ops.draws import uniform


class CaM(EvictionPolicy[CaMSettings]):
    """Ranks entries by the attention received from all queries so far, as H2O does; merges by the mean attention of
    the queries that saw an entry, equally for all heads of the group.

    An evicted value is added to each of the r newest, divided by r. The probability is the ratio of its mean attention
    to theirs, so the expected effect on a later output is the evicted entry's own.

    With a large r, an r-th of a few values is below the resolution of half precision. They are then divided among every
    n-th of the newest. Each moves back by one place per token, so all take their turn.
    """

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        received = attended.column_sums().sum(dim=2)
        return entries.accumulated(received=received, queries=seen_by(received, attended.tokens))

    def evict(self, entries: Entries, budget: int) -> Entries:
        recent = max(1, round(budget * self.settings.recent_ratio))
        index = best(entries.score("received"), budget, last=recent)
        mean = entries.score("received") / entries.score("queries")
        gone = others(index, entries.num_entries)
        odds = mean.gather(-1, gone) / mean[..., -recent:].mean(dim=-1, keepdim=True)
        draws = uniform(entries.positions.gather(-1, gone), self.settings.seed, self.layer_idx)
        joins = draws < odds
        kept = entries.kept(index)
        # Checking on a GPU would wait for it; without any merge the sums below add nothing.
        if joins.device.type == "cpu" and not joins.any():
            return kept
        evicted = entries.values.gather(2, gone[..., None].expand(*gone.shape, entries.values.shape[3]))
        weights = joins.float()
        # Several are added by a matrix product, whose order of addition is deterministic.
        total = weights[..., None] * evicted if gone.shape[2] == 1 else weights[..., None, :] @ evicted.float()
        every = -(-recent // (gone.shape[2] * most_that_show(kept.values.dtype)))
        merged = kept.values[:, :, -recent::every]
        # In place, because `kept` is new memory; added in float32 whatever the dtype.
        merged.add_(total / merged.shape[2])
        return kept


def most_that_show(dtype: torch.dtype) -> int:
    """Number of entries of type `dtype` among which a value of their size may be divided without losing the parts.

    A part is four times the type's epsilon, so rounding changes it by at most an eighth. A part of half an epsilon
    would be lost.
    """
    return int(1 / (4 * torch.finfo(dtype).eps))
