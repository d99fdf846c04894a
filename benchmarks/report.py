"""Tables of the documents, written from the records in `benchmarks/results/`.

    python -m benchmarks.report [--check] [PAGE ...]

A record is a JSON file that answers one question with one or more measurements; `benchmarks/results/README.md` says
what each field holds. A page shows a record between two comments:

    <!-- record: sparse_prefill -->
    <!-- end of record -->

The command replaces what stands between them with the record's goal, setup, commands, current tables and verdicts.
Superseded measurements stay in the record and are not shown. `--check` changes nothing and exits with 1 where a page
is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hetero_kv.errors import HeteroKVError

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "results"
_NAMES = ("benchmarks", "results", "evaluation", "methods", "cuda", "cluster", "cluster_simulation")
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in _NAMES)
CURRENT, SUPERSEDED = "current", "superseded"
# A number, with a unit or an interval behind it; or nothing.
_NUMBER = re.compile(r"([-+\u2212]?[\d.,]+( ?\S{1,8})?( \(.*\))?)?")
_MARKED = re.compile(r"(<!-- record: ([\w-]+) -->\n).*?(<!-- end of record -->)", re.DOTALL)


def caption(part: str, length: int, samples: int) -> str:
    """The comment before a table, by which `benchmarks.results_plots` finds it."""
    return f"<!-- {part}, {length:,} tokens, {samples} samples -->"


@dataclass(frozen=True)
class Measurement:
    """One run's table.

    Attributes:
        status: `current`, or `superseded` by a later measurement of the same question.
        command: one or more shell lines; None where the figures were entered without one.
        commit: the commit that entered the figures in the documents.
        of: [part, length, samples] of a table that `benchmarks.results_plots` draws.
        shown: the columns that pages show; all of them if None.
        pivot: [row, column, value] names: pages show a row per recipe and a column per budget, without intervals.
    """

    status: str
    command: str | None
    machine: str
    commit: str | None
    date: str | None
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    note: str | None = None
    verdict: str | None = None
    of: tuple[str, int, int] | None = None
    shown: Sequence[str] | None = None
    pivot: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class ResultRecord:
    """A question, its goal and setup, and its measurements, the current ones first."""

    question: str
    goal: str | None
    setup: str
    measurements: Sequence[Measurement]


def load(name: str, folder: Path = RECORDS) -> ResultRecord:
    """The record of that name. Raises HeteroKVError if there is none, or if a field or cell is invalid."""
    path = folder / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.json")))
        raise HeteroKVError(f"no record {name!r} in {folder}; there are: {known}")
    data = json.loads(path.read_text(encoding="utf-8"))
    try:
        measurements = tuple(Measurement(**entry) for entry in data.pop("measurements"))
        record = ResultRecord(**data, measurements=measurements)
    except (KeyError, TypeError) as error:
        names = ", ".join(field.name for field in fields(Measurement))
        raise HeteroKVError(f"record {path.name}: {error}; a measurement has the fields {names}") from error
    for measurement in measurements:
        _check(measurement, path.name)
    return record


def _check(measurement: Measurement, name: str) -> None:
    if measurement.status not in (CURRENT, SUPERSEDED):
        raise HeteroKVError(f"record {name}: status {measurement.status!r}; use {CURRENT!r} or {SUPERSEDED!r}")
    if unknown := set(measurement.shown or ()) - set(measurement.columns):
        raise HeteroKVError(f"record {name}: shown has {sorted(unknown)}; the columns are {list(measurement.columns)}")
    for row in measurement.rows:
        if len(row) != len(measurement.columns):
            raise HeteroKVError(f"record {name}: the row {row} has {len(row)} of {len(measurement.columns)} cells")


def rendered(record: ResultRecord) -> str:
    """The record in Markdown: goal and setup, then each current measurement."""
    parts = [f"**{record.question}** {record.setup}"]
    if record.goal:
        parts.append(f"Goal: {record.goal}")
    parts += [_measurement(entry) for entry in record.measurements if entry.status == CURRENT]
    return "\n\n".join(parts)


def _measurement(entry: Measurement) -> str:
    made = f"{entry.machine}; commit `{entry.commit}`, {entry.date}." if entry.commit else f"{entry.machine}."
    parts = [f"*{entry.title}.* {made}" if entry.title else made]
    if entry.command:
        parts.append(f"```sh\n{entry.command}\n```")
    parts.append(_table(entry))
    if remarks := " ".join(text for text in (entry.verdict, entry.note) if text):
        parts.append(remarks)
    return "\n\n".join(parts)


def plotted_tables(page: str, folder: Path = RECORDS) -> str:
    """The tables of the page's records that plots are drawn from, with all rows and columns."""
    records = [load(name, folder) for _, name, _ in _MARKED.findall(page)]
    entries = [entry for record in records for entry in record.measurements if entry.of and entry.status == CURRENT]
    return "\n\n".join(_table(replace(entry, shown=None, pivot=None)) for entry in entries)


def _table(entry: Measurement) -> str:
    head, *rows = _pivoted(entry, *entry.pivot) if entry.pivot else _selected(entry)
    aligned = "|".join("---:" if _is_numeric(column) else "---" for column in zip(*rows, strict=True))
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, f"|{aligned}|")
    return "\n".join([caption(*entry.of), *lines] if entry.of and not entry.pivot else lines)


def _selected(entry: Measurement) -> list[list[str]]:
    places = [number for number, name in enumerate(entry.columns) if entry.shown is None or name in entry.shown]
    return [[cells[place] for place in places] for cells in (entry.columns, *entry.rows)]


def _pivoted(entry: Measurement, row: str, column: str, value: str) -> list[list[str]]:
    at_row, at_column, at_value = (entry.columns.index(name) for name in (row, column, value))
    rows = [cells for cells in entry.rows if cells[at_value]]
    found = {(cells[at_row], cells[at_column]): cells[at_value].partition(" (")[0] for cells in rows}
    names, heads = (list(dict.fromkeys(cells[place] for cells in rows)) for place in (at_row, at_column))
    return [[row, *heads], *([name, *(found.get((name, head), "") for head in heads)] for name in names)]


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(cell) for cell in cells)


def filled(page: str, folder: Path = RECORDS) -> str:
    """The page with every marked record rewritten. Raises HeteroKVError if a record is missing."""

    def section(match: re.Match[str]) -> str:
        return f"{match[1]}\n{rendered(load(match[2], folder))}\n\n{match[3]}"

    return _MARKED.sub(section, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; returns 1 where `--check` finds one out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="all that show records if none is named")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a page is out of date")
    flags: Any = parser.parse_args(arguments)
    outdated = []
    for path in flags.pages:
        before = path.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            outdated.append(path)
            if not flags.check:
                path.write_text(after, encoding="utf-8")
            print(f"{path}: {'out of date; run python -m benchmarks.report' if flags.check else 'written'}")
    return 1 if flags.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
