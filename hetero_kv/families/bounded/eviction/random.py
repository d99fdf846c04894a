"""A uniformly random choice: the control that every policy must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpu_ops.draws import drawn
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import StridedSettings, policy_setting
from hetero_kv.settings.setting import setting


@dataclass(frozen=True)
class RandomSettings(StridedSettings):
    """Random entries, as a control."""

    policy: str = policy_setting("random")
    prefill: Literal["full", "strided"] = setting(
        "full", "full attention over the prompt before entries are drawn, or in strides"
    )
    seed: int = setting(0, "of the draw", minimum=0)


@register("random", meaning="a uniformly random choice per kv head: the control", settings=RandomSettings)
class RandomChoice(EvictionPolicy[RandomSettings]):
    """Each token draws a number on arrival, independent of how the prompt is split; the highest stay."""

    def __init__(self, settings: RandomSettings, layer_idx: int, num_layers: int) -> None:
        super().__init__(settings, layer_idx, num_layers)
        self.strided = settings.prefill == "strided"

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        return entries.scored(draw=drawn(entries.positions, self.settings.seed, self.layer_idx))

    def evict(self, entries: Entries, budget: int) -> Entries:
        return entries.kept(best(entries.score("draw"), budget))
