"""Shared parts of plots: the frame, ticks with numbers, and labels next to the lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_LINE = 9.0
"""Points from one line of labels to the next."""


@dataclass(frozen=True)
class Label:
    """A line's name, drawn next to the point (x, y) in the line's colour."""

    text: str
    x: float
    y: float
    color: str


def new_figure() -> tuple[Any, Any]:
    """A figure, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    return figure, figure.subplots()


def label_decades(axis: Any, text: Callable[[float], str]) -> None:
    """Write numbers at the ticks of a logarithmic axis: at its decades, and at 2, 3 and 5 times them."""
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(lambda value, _: text(value) if f"{value:.0e}"[0] in "235" else "")


def label_lines(figure: Any, axes: Any, labels: Sequence[Label]) -> None:
    """Write each label next to its point, where it covers no point of a line and no other label.

    If no place within ten lines of text is free, a label is put to the right of its point.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    points = [place for line in axes.lines for place in _along(axes.transData.transform(line.get_xydata()))]
    boxes: list[Any] = []
    for label in labels:
        for shift, side in _places():
            text = _annotation(axes, label, shift, side)
            box = text.get_window_extent().padded(1)
            text.remove()
            if not any(box.overlaps(other) for other in boxes) and not any(box.contains(*point) for point in points):
                break
        else:
            shift, side = next(_places())
        boxes.append(box)
        _annotation(axes, label, shift, side, joined=abs(shift[1]) > _LINE)


def _annotation(axes: Any, label: Label, shift: tuple[float, float], side: str, joined: bool = False) -> Any:
    arrow = {"arrowstyle": "-", "color": label.color, "lw": 0.5} if joined else None
    return axes.annotate(
        label.text,
        (label.x, label.y),
        shift,
        textcoords="offset points",
        color=label.color,
        fontsize=8,
        ha=side,
        va="center",
        arrowprops=arrow,
    )


def _along(corners: Any) -> Iterator[Any]:
    for start, end in pairwise(corners):
        yield from (start + (end - start) * part / 20 for part in range(20))
    yield corners[-1]


def _places() -> Iterator[tuple[tuple[float, float], str]]:
    for step in range(11):
        for sign in (1, -1) if step else (1,):
            yield (9.0, sign * step * _LINE), "left"
            if step:
                yield (-9.0, sign * step * _LINE), "right"


def save(figure: Any, axes: Any, path: Path) -> None:
    """Write a PNG with a grid; if lines have names, with a legend outside the axes."""
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
