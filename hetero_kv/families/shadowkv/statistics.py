"""The statistics of a ShadowKV layer."""

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
    """Counts since the cache was created or reset.

    Attributes:
        hits, choices: chunks that were resident when chosen, and chunks chosen, over all kv heads and steps.
        outside, energy: squared norms of the keys that entered the Context since the last factorisation, the part
            outside the subspace and the total, [batch] float64; None before.
        factored: number of factorisations.
        recall: measured shares of the full attention mass in the attended tokens, one per step.
    """

    hits: int = 0
    choices: int = 0
    outside: torch.Tensor | None = None
    energy: torch.Tensor | None = None
    factored: int = 0
    recall: Tally = NO_NUMBERS

    @property
    def hit_rate(self) -> float | None:
        """Share of the chosen chunks that were resident from the previous step; None before the first choice."""
        return self.hits / self.choices if self.choices else None

    @property
    def energy_outside(self) -> float | None:
        """Share of the keys' energy outside the subspace, for tokens that entered since the last factorisation."""
        if self.outside is None or self.energy is None:
            return None
        return float(self.outside.sum() / self.energy.sum())

    def by_name(self) -> dict[str, float | int | None]:
        """The values of the statistics, by name."""
        return {
            BLOCK_RECALL.name: self.recall.mean,
            CHUNK_HIT_RATE.name: self.hit_rate,
            KEY_ENERGY_OUTSIDE.name: self.energy_outside,
        }

    def with_factors(self) -> LowRankStatistics:
        """The counts after another factorisation."""
        return replace(self, factored=self.factored + 1, outside=None, energy=None)

    def with_energy(self, outside: torch.Tensor, energy: torch.Tensor) -> LowRankStatistics:
        """The counts with the energy of more keys added."""
        if self.outside is not None and self.energy is not None:
            outside, energy = self.outside + outside, self.energy + energy
        return replace(self, outside=outside, energy=energy)

    def with_choices(self, hits: int, choices: int) -> LowRankStatistics:
        """The counts with a step's choices added."""
        # Not `replace`, which visits every field: this runs for every layer of every token.
        rest = self.outside, self.energy, self.factored, self.recall
        return LowRankStatistics(self.hits + hits, self.choices + choices, *rest)

    def without_hits(self, missed: int) -> LowRankStatistics:
        """The counts, with `missed` of the hits turned into misses."""
        return replace(self, hits=self.hits - missed)

    def with_recall(self, covered: float) -> LowRankStatistics:
        """The counts with a step's share of attention mass added."""
        return replace(self, recall=self.recall.plus(covered))

    def selected(self, rows: torch.Tensor) -> LowRankStatistics:
        """The counts whose row i is the former row `rows[i]`."""
        if self.outside is None or self.energy is None:
            return self
        rows = rows.to(self.energy.device)
        return replace(self, outside=self.outside[rows], energy=self.energy[rows])
