"""Draws the plots of the results page from its tables and records.

    python -m benchmarks.results_plots docs/results.md

Every picture `results-PART-LENGTH.png` of the page is written to its folder, with a labelled line per recipe: for
fidelity the divergence against the bytes read, both logarithmic; for scored tasks the score against the budget.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Label, label_decades, label_lines, new_figure, save
from benchmarks.report import plotted_tables
from hetero_kv.errors import HeteroKVError

FIDELITY = "fidelity"
_FULL = "full attention"
_TABLE = re.compile(r"<!-- (\w+), ([\d,]+) tokens, (\d+) samples -->\n((?:\|.*\n?)+)")
_PICTURE = re.compile(r"\((results-(\w+)-(\d+)\.png)\)")
# What a column's head begins with whose values are drawn; bytes are the last column.
_VALUES = ("KL", "score")


@dataclass(frozen=True)
class Point:
    """A row of a table.

    Attributes:
        share: attended tokens as a share of the prompt's; None as shipped.
        value: the mean divergence in nats, or the mean score.
        kilobytes: read per layer and token, the least of several tasks; None if the row lacks it.
    """

    recipe: str
    share: float | None
    value: float
    kilobytes: float | None


@dataclass(frozen=True)
class Table:
    """A table of the page, with full attention's value apart."""

    part: str
    length: int
    samples: int
    full: float
    points: tuple[Point, ...]


def tables_of(page: str) -> dict[tuple[str, int], Table]:
    """The tables behind captions, by part and length. Raises HeteroKVError where a row is none."""
    found = {}
    for part, length, samples, text in _TABLE.findall(page):
        head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines())
        value = _column(head, *_VALUES)
        if value is None:
            continue
        try:
            points = [_point(row[0], row[1], row[value], row[-1]) for row in rows]
        except (IndexError, ValueError) as error:
            raise HeteroKVError(f"a row of the table of {part} at {length} tokens cannot be read: {error}") from error
        full = next((point.value for point in points if point.recipe == _FULL), 0.0)
        own = tuple(point for point in points if point.recipe != _FULL)
        tokens = int(length.replace(",", ""))
        found[part, tokens] = Table(part, tokens, int(samples), full, own)
    return found


def _column(head: Sequence[str], *beginnings: str) -> int | None:
    return next((number for number, name in enumerate(head) if name.startswith(beginnings)), None)


def _point(recipe: str, tokens: str, value: str, kilobytes: str) -> Point:
    over = re.fullmatch(r"1/(\d+)", tokens)
    share = 1 / int(over[1]) if over else None
    return Point(recipe, share, float(value.split()[0]), float(kilobytes.split()[0]) if kilobytes else None)


def plot(table: Table, path: Path) -> None:
    """Divergence against bytes, or score against budget; what recipes do as shipped is a star."""
    figure, axis = new_figure()
    fidelity = table.part == FIDELITY
    labels = []
    for number, recipe in enumerate(dict.fromkeys(point.recipe for point in table.points)):
        own = [point for point in table.points if point.recipe == recipe]
        line = sorted(_place(point, fidelity) for point in own if point.share is not None)
        style = {"color": f"C{number % 10}", "marker": "osD^v<>PX*"[number % 10]}
        if line:
            axis.plot(*zip(*line, strict=True), linestyle="--" if number > 9 else "-", **style)
            labels.append(Label(recipe, *line[-1], style["color"]))
        for point in own:
            if fidelity and point.share is None:
                axis.plot(*_place(point, fidelity), **style | {"marker": "*", "markersize": 15, "linestyle": "none"})
                labels.append(Label(f"{recipe}, as shipped", *_place(point, fidelity), style["color"]))
    axis.set_xscale("log", base=10 if fidelity else 2)
    axis.margins(x=0.12)
    if fidelity:
        axis.set_yscale("log")
        axis.set_xlabel("KB that a decoded token's attention reads in a layer")
        axis.set_ylabel("divergence from full attention, nats")
        label_decades(axis.xaxis, lambda value: f"{value:g}")
        label_decades(axis.yaxis, lambda value: f"{value:g}")
        title = "Nearer to full attention: lower. Fewer bytes: further left"
    else:
        axis.set_xticks(shares := sorted({point.share for point in table.points if point.share}))
        axis.plot([shares[0], shares[-1]], [table.full] * 2, color="0.4", linestyle="--")
        axis.set_xticklabels(f"1/{round(1 / share)}" for share in shares)
        axis.minorticks_off()
        axis.set_xlabel("attended tokens, as a share of the prompt's tokens")
        axis.set_ylabel("score, share of right answers")
        axis.set_ylim(-0.06, 1.02)
        axis.set_xlim(right=shares[-1] * 1.45)
        labels.insert(0, Label(_FULL, shares[-1], table.full, "0.4"))
        title = "Right answers by budget"
    axis.set_title(f"{title} ({table.part}, {table.length:,} tokens, {table.samples} samples)", fontsize=10)
    label_lines(figure, axis, labels)
    save(figure, axis, path)


def _place(point: Point, fidelity: bool) -> tuple[float, float]:
    at = point.kilobytes if fidelity else point.share
    assert at is not None
    return at, point.value


def pictures_of(page: Path) -> Sequence[Path]:
    """Draw the page's pictures, and return their paths. Raises HeteroKVError for a picture without a table."""
    text = page.read_text()
    tables, drawn = tables_of(plotted_tables(text)) | tables_of(text), []
    for name, part, length in dict.fromkeys(_PICTURE.findall(text)):
        table = tables.get((part, int(length)))
        if table is None:
            captions = ", ".join(f"{known} {tokens}" for known, tokens in tables) or "none"
            raise HeteroKVError(f"{page} shows {name}, and has no table of {part} at {length} tokens ({captions})")
        plot(table, page.parent / name)
        drawn.append(page.parent / name)
    return drawn


def main() -> None:
    """Draw the page's pictures, and name them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    for path in pictures_of(parser.parse_args().page):
        print(path)


if __name__ == "__main__":
    main()
