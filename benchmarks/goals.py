"""Goals and verdicts, as every benchmark that has some prints them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def verdicts_table(reached: Iterable[tuple[str, float, float]]) -> Table:
    """A table of (what, ratio or share reached, the least that is wanted)."""
    table = Table("goal", "reached", "wanted", "verdict")
    for what, value, least in reached:
        table.add_row(what, f"{value:.2f}", f"{least:.2f}", "met" if value >= least else "missed")
    return table
