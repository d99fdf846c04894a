"""D2O (Wan et al. 2024, arXiv:2406.13035): heavy hitters; evicted entries are merged into similar kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.allocation import shared_out
from hetero_kv.families.bounded.eviction.merging import merged, nearest
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.ranking import best, others
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import WholePromptSettings, policy_setting
from hetero_kv.settings.setting import setting


@dataclass(frozen=True)
class D2OSettings(WholePromptSettings):
    """D2O: heavy hitters and the newest tokens, the evicted merged into them, more of them where attention is dense."""

    policy: str = policy_setting("d2o")
    sinks: int = setting(4, "first tokens of the sequence, always kept", unit="tokens", minimum=0)
    recent_ratio: float = setting(
        0.25, "share of the budget without the sinks that the newest tokens have", minimum=0, maximum=1
    )
    threshold: float | Literal["ema"] = setting(
        "ema",
        "cosine similarity from which an evicted entry is merged into the kept one that is most like it; ema: the mean "
        "of the prompt's, then a moving average; above 1: never",
    )
    beta: float = setting(0.7, "weight of the newest similarity in the moving average", minimum=0, maximum=1)
    allocation: Literal["relative", "absolute", "uniform"] = setting(
        "relative",
        "how the budget is shared out to layers, in proportion to exp(-variance) of the attention that their entries "
        "received: relative scales variances to 0-1 over the layers; absolute takes them as they are; uniform: all the "
        "same",
    )

    @property
    def least(self) -> int:
        return self.sinks + 1


@register(
    "d2o",
    meaning="the highest accumulated attention, sinks and the newest; the evicted are merged into what is like them",
    settings=D2OSettings,
)
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
            sum(budgets), variances.tolist(), self.settings.least, [entries.num_entries for entries in layers]
        )

    def end_of_prompt(self, entries: Entries) -> Entries:
        return entries.carrying(threshold=None)

    def evict(self, entries: Entries, budget: int) -> Entries:
        """Evict and merge by eq. 8 to 12; see EvictionPolicy."""
        sinks = self.settings.sinks
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
