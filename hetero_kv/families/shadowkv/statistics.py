"""What a ShadowKV layer counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hetero_kv.engine.statistics import BLOCK_RECALL, NO_NUMBERS, Statistic, Tally, register

CHUNK_HIT_RATE = register(
    Statistic(
        "chunk_hit_rate",
        "chunk hit rate",
        "share of the chosen chunks that were where the model computes already, from the step before",
    )
)
KEY_RANK = register(Statistic("key_rank", "key rank", "rank of the keys' low-rank factors"))
KEY_ENERGY_OUTSIDE = register(
    Statistic(
        "key_energy_outside",
        "key energy outside",
        "share of the keys' energy that their low-rank factors leave out, since they were last factored",
    )
)


@dataclass(frozen=True)
class LowRankStatistics:
    """Counts since the cache was new or reset.

    Attributes:
        hits, choices: chunks that were resident when they were chosen, and chunks chosen, over all kv heads and steps.
        outside, energy: squared norm of the keys that entered the Context since the keys were last factored, the part
            of it outside of the subspace and all of it, [batch] float64; None before.
        factored: how often the keys were factored.
        recall: the measured shares of the full attention mass that the attended tokens covered, a step's each.
    """

    hits: int = 0
    choices: int = 0
    outside: torch.Tensor | None = None
    energy: torch.Tensor | None = None
    factored: int = 0
    recall: Tally = NO_NUMBERS

    @property
    def hit_rate(self) -> float | None:
        """Share of the chosen chunks that were resident from the step before; None before the first choice."""
        return self.hits / self.choices if self.choices else None

    @property
    def energy_outside(self) -> float | None:
        """Share of the keys' energy outside of the subspace, of tokens that entered since the keys were factored."""
        if self.outside is None or self.energy is None:
            return None
        return float(self.outside.sum() / self.energy.sum())

    def by_name(self) -> dict[str, float | int | None]:
        """What they come to, under the names of the statistics."""
        return {
            BLOCK_RECALL.name: self.recall.mean,
            CHUNK_HIT_RATE.name: self.hit_rate,
            KEY_ENERGY_OUTSIDE.name: self.energy_outside,
        }

    def with_factors(self) -> LowRankStatistics:
        """These, when the keys have been factored anew."""
        return replace(self, factored=self.factored + 1, outside=None, energy=None)

    def with_energy(self, outside: torch.Tensor, energy: torch.Tensor) -> LowRankStatistics:
        """These and the energy of more keys."""
        if self.outside is not None and self.energy is not None:
            outside, energy = self.outside + outside, self.energy + energy
        return replace(self, outside=outside, energy=energy)

    def with_choices(self, hits: int, choices: int) -> LowRankStatistics:
        """These and a step's choices."""
        # Not `replace`, which looks at every field: this is called for every layer of every token.
        rest = self.outside, self.energy, self.factored, self.recall
        return LowRankStatistics(self.hits + hits, self.choices + choices, *rest)

    def without_hits(self, missed: int) -> LowRankStatistics:
        """These, when so many of the chunks that count as hits were none."""
        return replace(self, hits=self.hits - missed)

    def with_recall(self, covered: float) -> LowRankStatistics:
        """These and a step's share of attention mass."""
        return replace(self, recall=self.recall.plus(covered))

    def selected(self, rows: torch.Tensor) -> LowRankStatistics:
        """These, with row i what row `rows[i]` was."""
        if self.outside is None or self.energy is None:
            return self
        rows = rows.to(self.energy.device)
        return replace(self, outside=self.outside[rows], energy=self.energy[rows])
