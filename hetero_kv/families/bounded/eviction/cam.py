"""CaM (Zhang et al., ICML 2024): heavy hitters, with the values of what is evicted merged into the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_ops.draws import uniform
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import Attended, EvictionPolicy
from hetero_kv.families.bounded.eviction.ranking import best, others, seen_by
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import WholePromptSettings, policy_setting
from hetero_kv.settings.setting import setting


@dataclass(frozen=True)
class CaMSettings(WholePromptSettings):
    """CaM: heavy hitters and the newest tokens, the values of the evicted merged into the newest."""

    policy: str = policy_setting("cam")
    recent_ratio: float = setting(
        0.5, "share of the budget that the newest tokens have, which evicted values are added to", minimum=0, maximum=1
    )
    seed: int = setting(0, "of the draws that say which evicted values are added", minimum=0)


@register(
    "cam",
    meaning="as h2o; the values of the evicted are added to the newest tokens', by chance, as attention has it",
    settings=CaMSettings,
)
class CaM(EvictionPolicy[CaMSettings]):
    """Ranks entries by the attention received from all queries so far, as H2O does; merges by the mean attention of
    the queries that saw an entry, all heads of the group alike.

    An evicted value is added to each of the r newest, divided by r, with the probability that its mean attention has
    to that of these: what they add to a later output is then, in the mean, what it would have added itself.

    An r-th of a few values is less than half precision tells of an entry, where r is large. There they are divided
    among every n-th of the newest. Each moves back by a place with every token, so that they take turns.
    """

    def observe(self, entries: Entries, attended: Attended) -> Entries:
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
        # Asking a GPU would wait for it; nothing is added where none joins.
        if joins.device.type == "cpu" and not joins.any():
            return kept
        evicted = entries.values.gather(2, gone[..., None].expand(*gone.shape, entries.values.shape[3]))
        weights = joins.float()
        # Of several a product with a matrix, whose order of addition is the same every time.
        total = weights[..., None] * evicted if gone.shape[2] == 1 else weights[..., None, :] @ evicted.float()
        every = -(-recent // (gone.shape[2] * most_that_show(kept.values.dtype)))
        merged = kept.values[:, :, -recent::every]
        # In memory that was just taken for them; added in float32, whatever they are.
        merged.add_(total / merged.shape[2])
        return kept


def most_that_show(dtype: torch.dtype) -> int:
    """Entries of type `dtype` among which a value like their own may be divided so that each tells its part.

    Four times the type's epsilon of it, so that rounding takes or gives an eighth of a part at most. A part of half an
    epsilon would be lost.
    """
    return int(1 / (4 * torch.finfo(dtype).eps))
