"""A uniformly random choice: the control that every policy must beat."""

from __future__ import annotations

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import RandomSettings
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.gpu_ops.draws import drawn


class RandomChoice(EvictionPolicy[RandomSettings]):
    """Each token draws a number on arrival, independent of how the prompt is split; the highest stay."""

    def __init__(self, settings: RandomSettings, layer_idx: int, num_layers: int) -> None:
        super().__init__(settings, layer_idx, num_layers)
        self.strided = settings.prefill == "strided"

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        return entries.scored(draw=drawn(entries.positions, self.settings.seed, self.layer_idx))

    def evict(self, entries: Entries, budget: int) -> Entries:
        return entries.kept(best(entries.score("draw"), budget))
