"""The statistics of cache layers, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetero_kv.errors import HeteroKVError

#: Name -> one value per layer of a model; None for a layer without that statistic.
LayerStatistics = Mapping[str, Sequence[float | int | None]]


class Statistic(NamedTuple):
    """A number that the cache layers of an operator report.

    Attributes:
        name: in `HeteroCache.statistics` and in JSON.
        title: heading in tables.
        meaning: one line.
    """

    name: str
    title: str
    meaning: str


_REGISTRY: dict[str, Statistic] = {}


def register(statistic: Statistic) -> Statistic:
    """Register a statistic under its name. Raises HeteroKVError if another one has that name."""
    if (known := _REGISTRY.setdefault(statistic.name, statistic)) != statistic:
        raise HeteroKVError(
            f"the statistic {statistic.name!r} is registered already, as {known.meaning!r}; give "
            f"{statistic.meaning!r} another name"
        )
    return statistic


def registered() -> Mapping[str, Statistic]:
    """The registered statistics by name."""
    return dict(_REGISTRY)


#: Common to retrieval families, with the engine's setting `measure_recall`.
BLOCK_RECALL = register(
    Statistic(
        "block_recall",
        "attention mass covered",
        "share of the full attention mass that the attended blocks covered, the mean over steps (`measure_recall`)",
    )
)


#: Common to families that attend to stored tokens; a layer keeps it as a `Tally`.
READ_BYTES = register(
    Statistic(
        "read_bytes",
        "bytes read per token and layer",
        "bytes of stored keys, values and their representations that a decoded token's attention read in a layer, the "
        "mean over steps",
    )
)


class Tally(NamedTuple):
    """The sum of some numbers, and their count."""

    total: float = 0.0
    numbers: int = 0

    def plus(self, *numbers: float) -> Tally:
        """The tally with further numbers."""
        return Tally(sum(numbers, self.total), self.numbers + len(numbers))

    @property
    def mean(self) -> float | None:
        """The mean; None without numbers."""
        return self.total / self.numbers if self.numbers else None


NO_NUMBERS = Tally()


def row_means(counted: Sequence[tuple[int, LayerStatistics]]) -> dict[str, list[float | int | None]]:
    """Means over rows of the layers' statistics, from groups of rows: their number, and their means.

    Rows without a value are left out; None where no row has one.
    """
    if len(counted) == 1:
        return {name: list(layers) for name, layers in counted[0][1].items()}
    names = dict.fromkeys(name for _, statistics in counted for name in statistics)
    return {name: _row_means([(rows, values[name]) for rows, values in counted if name in values]) for name in names}


def _row_means(groups: Sequence[tuple[int, Sequence[float | int | None]]]) -> list[float | int | None]:
    means: list[float | int | None] = []
    for layer in zip(*(values for _, values in groups), strict=True):
        known = [(rows, value) for (rows, _), value in zip(groups, layer, strict=True) if value is not None]
        rows = sum(count for count, _ in known)
        means.append(sum(count * value for count, value in known) / rows if known else None)
    return means


def layer_means(statistics: LayerStatistics) -> dict[str, float]:
    """Name -> the mean over the layers with a value; names without a value are left out."""
    known = {name: [value for value in layers if value is not None] for name, layers in statistics.items()}
    return {name: sum(values) / len(values) for name, values in known.items() if values}
