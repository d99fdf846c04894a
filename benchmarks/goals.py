"""Formats goals and verdicts for all benchmarks."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def verdicts_table(reached: Iterable[tuple[str, float, float]]) -> Table:
    """A table of (goal, ratio or share reached, minimum)."""
    table = Table("goal", "reached", "minimum", "verdict")
    for what, value, least in reached:
        table.add_row(what, f"{value:.2f}", f"{least:.2f}", "met" if value >= least else "missed")
    return table
