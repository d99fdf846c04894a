"""What plots of results have in common: a frame with its legend beside it, and ticks that say their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def new_figure() -> tuple[Any, Any]:
    """A figure, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    return figure, figure.subplots()


def label_decades(axis: Any, text: Callable[[float], str]) -> None:
    """Write numbers at the ticks of a logarithmic axis: at its decades, and at 2, 3 and 5 times them."""
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(lambda value, _: text(value) if f"{value:.0e}"[0] in "235" else "")


def save(figure: Any, axes: Any, path: Path) -> None:
    """Write a PNG, with a grid, and the legend where it hides no line."""
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
