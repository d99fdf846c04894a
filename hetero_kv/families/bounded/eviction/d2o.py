"""D2O (Wan et al. 2024, arXiv:2406.13035): heavy hitters; evicted entries merge into similar kept ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.merging import merged, nearest
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import D2OSettings
from hetero_kv.families.bounded.eviction.ranking import best, others


class D2O(EvictionPolicy[D2OSettings]):
    """Ranks entries by the attention received from all queries so far, the mean over the group's heads (eq. 6).

    Each kv head has its own threshold. Every prompt, later ones too, resets it (eq. 10, t = 0).
    """

    allocates = True

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        return entries.accumulated(received=attended.column_sums().mean(dim=2))

    def allocate(self, layers: Sequence[Entries], budgets: Sequence[int]) -> Sequence[int]:
        """Dynamic allocation (eq. 4 and 5): fewer entries for layers whose column sums vary more, the same total.

        The variance is averaged over kv heads and over the sequences of a batch, which share their layers. A layer gets
        at most what it has, as long as another can use the rest.
        """
        if self.settings.allocation == "uniform":
            return budgets
        variances = torch.stack(
            [entries.score("received").var(dim=-1, correction=0).mean().cpu() for entries in layers]
        ).double()
        if self.settings.allocation == "relative":
            above = variances - variances.min()
            variances = above / above.max().clamp(min=torch.finfo(torch.float64).tiny)
        return shared_out(
            sum(budgets), variances.tolist(), self.settings.min_budget, [entries.num_entries for entries in layers]
        )

    def end_of_prompt(self, entries: Entries) -> Entries:
        return entries.carrying(threshold=None)

    def evict(self, entries: Entries, budget: int) -> Entries:
        """Evict and merge by eq. 8 to 12; see EvictionPolicy."""
        sinks = self.settings.sink_tokens
        recent = max(1, round((budget - sinks) * self.settings.recent_ratio))
        index = best(entries.score("received"), budget, first=sinks, last=recent)
        kept = entries.kept(index)
        limit = self.settings.threshold
        if isinstance(limit, float) and limit > 1:
            return kept
        evicted = entries.kept(others(index, entries.num_entries))
        similarities, matches = nearest(evicted.keys, kept.keys)
        if isinstance(limit, float):
            return merged(kept, evicted, similarities, matches, similarities >= limit)
        threshold = self._moved(entries.carried.get("threshold"), similarities)
        joins = similarities >= threshold[..., None]
        return merged(kept, evicted, similarities, matches, joins).carrying(threshold=threshold)

    def _moved(self, threshold: torch.Tensor | None, similarities: torch.Tensor) -> torch.Tensor:
        """The threshold [batch, kv_heads] after these similarities [batch, kv_heads, evicted] (eq. 10)."""
        newest = similarities.mean(dim=-1)
        if threshold is None:
            return newest
        return self.settings.beta * newest + (1 - self.settings.beta) * threshold


def shared_out(total: int, falling: Sequence[float], least: int, most: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to exp(-falling), each between `least` and its `most`, that sum to `total`.

    What exceeds a layer's `most` goes to the others, in the same proportion. If all have their `most`, each gets an
    equal part of the remainder.

    Args:
        total: at least `least` for each.
        falling: one number per layer, of any size; a higher one gets less.
        least: the minimum for each; where a layer's `most` is lower, that is its minimum.
        most: how many each can use.
    """
    if sum(most) <= total:
        return [count + (total - sum(most)) // len(most) for count in most]

    def shares(level: float) -> list[float]:
        # The exponent is bounded: shares beyond any `most` are cut anyway.
        found = (math.exp(min(level - height, 100.0)) for height in falling)
        return [min(top, max(least, share)) for share, top in zip(found, most, strict=True)]

    # The softmax is the level at which the shares sum to the total; with limits there is no closed form.
    low, high = min(falling), max(falling) + math.log(max(most)) + 1.0
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if sum(shares(level)) <= total else (low, level)
    found = shares(low)
    counts = [math.floor(share) for share in found]
    by_rest = sorted(range(len(found)), key=lambda index: counts[index] - found[index])
    for index in [index for index in by_rest if counts[index] < most[index]][: total - sum(counts)]:
        counts[index] += 1
    return counts
