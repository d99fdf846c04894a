"""BigBird's pattern (Zaheer et al. 2020, arXiv:2007.14062) as a fixed set: global tokens, a window, random blocks."""

from __future__ import annotations

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.policy_settings import BigBirdSettings
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.gpu_ops.draws import uniform


class BigBird(EvictionPolicy[BigBirdSettings]):
    """Each block draws a number once; the highest stay, the last of them in part if the budget requires it."""

    strided = True

    def evict(self, entries: Entries, budget: int) -> Entries:
        settings = self.settings
        first = round(budget * settings.global_ratio)
        last = min(budget - first, round(budget * settings.recent_ratio))
        draws = uniform(entries.positions // settings.block_size, settings.seed, self.layer_idx)
        return entries.kept(best(draws, budget, first=first, last=last))
