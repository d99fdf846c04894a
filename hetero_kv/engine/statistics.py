"""What cache layers count, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetero_kv.errors import HeteroKVError

#: Name -> one value per layer of a model; None for a layer that has nothing to say under that name.
LayerStatistics = Mapping[str, Sequence[float | int | None]]


class Statistic(NamedTuple):
    """A number that the cache layers of an operator know about themselves.

    Attributes:
        name: in `HeteroCache.statistics` and in JSON.
        title: as tables are headed.
        meaning: one line.
    """

    name: str
    title: str
    meaning: str


_REGISTRY: dict[str, Statistic] = {}


def register(statistic: Statistic) -> Statistic:
    """Make a statistic known under its name. Raises HeteroKVError for a name that another one has."""
    if (known := _REGISTRY.setdefault(statistic.name, statistic)) != statistic:
        raise HeteroKVError(
            f"the statistic {statistic.name!r} is registered already, as {known.meaning!r}; give "
            f"{statistic.meaning!r} another name"
        )
    return statistic


def registered() -> Mapping[str, Statistic]:
    """What is registered, by name."""
    return dict(_REGISTRY)


#: What families that retrieve have in common, with the engine's setting `measure_recall`.
BLOCK_RECALL = register(
    Statistic(
        "block_recall",
        "attention mass covered",
        "share of the full attention mass that the attended blocks covered, the mean over steps (`measure_recall`)",
    )
)


#: What families that attend to stored tokens have in common; a layer keeps it as a `Tally`.
READ_BYTES = register(
    Statistic(
        "read_bytes",
        "bytes read per token and layer",
        "bytes of stored keys, values and what stands for them that a decoded token's attention read in a layer, the "
        "mean over steps",
    )
)


class Tally(NamedTuple):
    """The sum of some numbers, and how many they are."""

    total: float = 0.0
    numbers: int = 0

    def plus(self, number: float) -> Tally:
        """With one more."""
        return Tally(self.total + number, self.numbers + 1)

    @property
    def mean(self) -> float | None:
        """None of no numbers."""
        return self.total / self.numbers if self.numbers else None


NO_NUMBERS = Tally()


def row_means(counted: Sequence[tuple[int, LayerStatistics]]) -> dict[str, list[float | int | None]]:
    """The means over rows of what layers have counted, from groups of rows: their number, and their means.

    Rows of which a layer says nothing are left out; None where that is all.
    """
    if len(counted) == 1:
        return {name: list(layers) for name, layers in counted[0][1].items()}
    names = dict.fromkeys(name for _, statistics in counted for name in statistics)
    return {name: _row_means([(rows, said[name]) for rows, said in counted if name in said]) for name in names}


def _row_means(groups: Sequence[tuple[int, Sequence[float | int | None]]]) -> list[float | int | None]:
    means: list[float | int | None] = []
    for layer in zip(*(values for _, values in groups), strict=True):
        said = [(rows, value) for (rows, _), value in zip(groups, layer, strict=True) if value is not None]
        rows = sum(count for count, _ in said)
        means.append(sum(count * value for count, value in said) / rows if said else None)
    return means


def layer_means(statistics: LayerStatistics) -> dict[str, float]:
    """Name -> the mean over the layers that have a value; without the names under which none has."""
    known = {name: [value for value in layers if value is not None] for name, layers in statistics.items()}
    return {name: sum(values) / len(values) for name, values in known.items() if values}
