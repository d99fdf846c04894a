"""BigBird's pattern (Zaheer et al. 2020, arXiv:2007.14062) as a fixed set: global tokens, a window, random blocks."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_ops.draws import uniform
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import StridedSettings, policy_setting
from hetero_kv.settings.setting import SettingError, setting


@dataclass(frozen=True)
class BigBirdSettings(StridedSettings):
    """BigBird: the first tokens, the newest, and random blocks, as a control."""

    policy: str = policy_setting("bigbird")
    block_size: int = setting(64, "tokens of a random block", unit="tokens", minimum=1)
    global_ratio: float = setting(0.25, "share of the budget for the sequence's first tokens", minimum=0, maximum=1)
    recent_ratio: float = setting(
        0.375, "share of the budget that the newest tokens have", minimum=0, maximum=1, formerly=("window_ratio",)
    )
    seed: int = setting(0, "of the draw", minimum=0)

    def validate(self) -> None:
        super().validate()
        if self.global_ratio + self.recent_ratio > 1:
            raise SettingError(
                "recent_ratio",
                self.recent_ratio,
                f"with global_ratio {self.global_ratio} it exceeds the budget; set at most {1 - self.global_ratio:g}",
            )


@register(
    "bigbird",
    meaning="the first tokens, the newest, and random blocks per kv head: a control",
    settings=BigBirdSettings,
)
class BigBird(EvictionPolicy[BigBirdSettings]):
    """Each block draws a number once; the highest stay, the last of them in part if the budget requires it."""

    strided = True

    def evict(self, entries: Entries, budget: int) -> Entries:
        settings = self.settings
        first = round(budget * settings.global_ratio)
        last = min(budget - first, round(budget * settings.recent_ratio))
        draws = uniform(entries.positions // settings.block_size, settings.seed, self.layer_idx)
        return entries.kept(best(draws, budget, first=first, last=last))
