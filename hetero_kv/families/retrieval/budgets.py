"""Block budgets of layers: one number, a number per layer, or a pyramid."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero_kv.errors import ConfigError

_PYRAMID = re.compile(r"\s*pyramid\s*\(\s*(\d{1,12})\s*,\s*(\d{1,12})\s*\)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Pyramid:
    """Budgets that fall linearly from the bottom layer to the top (PyramidKV, arXiv:2406.02069), `pyramid(low, high)`.

    Attributes:
        low: the top layer's budget.
        high: the bottom layer's budget.
    """

    low: int
    high: int

    #: The form of a value, for errors and the documentation.
    expected = "pyramid(low, high)"

    @classmethod
    def parse(cls, text: str) -> Pyramid | None:
        """Parse `text`. Returns None for another form, or if low is above high."""
        found = _PYRAMID.fullmatch(text)
        if found is None:
            return None
        low, high = int(found[1]), int(found[2])
        return cls(low, high) if low <= high else None

    def __str__(self) -> str:
        return f"pyramid({self.low}, {self.high})"


Budget = int | str | tuple[int, ...] | Pyramid


def layer_budget(key: str, budget: Budget, layer_idx: int, num_layers: int) -> int | None:
    """The number of blocks that layer `layer_idx` of `num_layers` may attend to; None for all of them.

    Raises ConfigError, naming the setting `key`, if a list does not have one number per layer.
    """
    if budget == "all":
        return None
    if isinstance(budget, Pyramid):
        share = layer_idx / max(1, num_layers - 1)
        return round(budget.high - share * (budget.high - budget.low))
    if isinstance(budget, tuple):
        if len(budget) != num_layers:
            raise ConfigError(
                f"{key} lists {len(budget)} numbers, but the model has {num_layers} layers; set one number per layer"
            )
        return budget[layer_idx]
    return int(budget)
