"""Prints tables of the measurements of `benchmarks.results`: recipes at equal tokens, and at equal bytes.

    python -m benchmarks.results_page --out DIRECTORY

There is a Markdown table for each part and length: means, with 95 % bootstrap intervals over samples. Bytes are those
that a decoded token's attention reads in a layer, including representatives (`read_bytes`). A comment before each table
identifies it for `benchmarks.results_plots`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.budgeted_recipes import SHIPPED
from benchmarks.report import caption
from benchmarks.results import CELLS
from hetero_kv.evals.bootstrap import mean_interval
from hetero_kv.evals.config_spec import BASELINE
from hetero_kv.evals.outcome import Result
from hetero_kv.evals.run_folder import read_results

_FULL = "full attention"


@dataclass(frozen=True)
class ResultRow:
    """One recipe at one budget, on the samples that all rows of its table share.

    Attributes:
        fraction: prompt tokens per attended token; `SHIPPED`; None for full attention.
        results: a result per sample, in one order for all rows.
    """

    recipe: str
    fraction: int | str | None
    results: tuple[Result, ...]

    @property
    def budget(self) -> str:
        """The budget as the table shows it."""
        return {None: "all", SHIPPED: SHIPPED}.get(self.fraction, f"1/{self.fraction}")

    def values(self, name: str) -> list[float]:
        """The samples' scores, or one part of each score."""
        return [float(result.score or 0) if name == "score" else result.parts[name] for result in self.results]

    def counted(self, name: str) -> float | None:
        """The mean of a statistic of the method's layers; None if they do not count it."""
        found = [value for result in self.results if (value := result.cost.counted.get(name)) is not None]
        return fmean(found) if found else None


def rows_of(folders: Iterable[Path]) -> list[ResultRow]:
    """The rows of the runs in `folders`, restricted to the samples that all of them have; [] if there are none.

    If several runs have the same row, the first counts. Full attention comes first, then each recipe by increasing
    budget, then recipes as shipped.
    """
    found: dict[tuple[str, int | str | None], dict[str, Result]] = {}
    for folder in folders:
        listed = json.loads((folder / CELLS).read_text())
        cells = {name: (recipe, fraction) for recipe, fraction, name in listed}
        cells[BASELINE] = (_FULL, None)
        own: dict[tuple[str, int | str | None], dict[str, Result]] = {}
        for result in read_results(folder / "run"):
            if result.method is not None:
                own.setdefault(cells[result.method], {})[result.sample] = result
        # All results of a row are from one run, so that they have the same settings.
        found = own | found
    order = sorted(set.intersection(*map(set, found.values()))) if found else []
    rows = [ResultRow(*key, tuple(results[sample] for sample in order)) for key, results in found.items() if order]
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    return sorted(rows, key=lambda row: (_budget_order(row.fraction), recipes.index(row.recipe), -_tokens_to_one(row)))


def _budget_order(fraction: int | str | None) -> int:
    """Full attention, recipes at budgets, recipes as shipped."""
    return 0 if fraction is None else 2 if fraction == SHIPPED else 1


def _tokens_to_one(row: ResultRow) -> int:
    return row.fraction if isinstance(row.fraction, int) else 0


def fidelity_table(rows: Sequence[ResultRow]) -> str:
    """Agreement, divergence, tokens and bytes of every row."""
    lines = [
        "| recipe | tokens | agreement | KL, nats | KB read |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        read = row.counted("read_bytes")
        lines.append(
            f"| {row.recipe} | {row.budget} | {_interval(row.values('top_1_agreement'))} "
            f"| {_interval(row.values('kl_divergence'))} | {'' if read is None else f'{read / 1e3:.0f}'} |"
        )
    return "\n".join(lines)


def scores_table(rows: Sequence[ResultRow]) -> str:
    """Mean scores of every row over all tasks, and of each task."""
    tasks = sorted({result.task for result in rows[0].results})
    names = [task.rpartition("/")[2] for task in tasks]
    lines = [
        f"| recipe | tokens | score | {' | '.join(names)} | KB read |",
        f"|---|---:|---:|{'---:|' * len(names)}---:|",
    ]
    for row in rows:
        read = row.counted("read_bytes")
        of_tasks = (fmean(float(r.score or 0) for r in row.results if r.task == task) for task in tasks)
        lines.append(
            f"| {row.recipe} | {row.budget} | {_interval(row.values('score'))} "
            f"| {' | '.join(f'{value:.2f}' for value in of_tasks)} | {'' if read is None else f'{read / 1e3:.0f}'} |"
        )
    return "\n".join(lines)


def perplexity_table(rows: Sequence[ResultRow]) -> str:
    """Perplexity of every row, and its mean negative log-likelihood less full attention's, sample by sample."""
    (full,) = (row.values("nll") for row in rows if row.fraction is None)
    lines = ["| recipe | tokens | perplexity | nats above full attention | KB read |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        nll, read = row.values("nll"), row.counted("read_bytes")
        above = "" if row.fraction is None else _interval([own - of for own, of in zip(nll, full, strict=True)])
        lines.append(
            f"| {row.recipe} | {row.budget} | {math.exp(fmean(nll)):.2f} | {above} "
            f"| {'' if read is None else f'{read / 1e3:.0f}'} |"
        )
    return "\n".join(lines)


_TABLES: dict[str, Callable[[Sequence[ResultRow]], str]] = {"fidelity": fidelity_table, "perplexity": perplexity_table}
"""Of parts whose samples are not scored as right or wrong."""


def _interval(values: Sequence[float]) -> str:
    low, high = mean_interval(values)
    digits = 3 if fmean(values) < 0.2 else 2
    return f"{fmean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="as of benchmarks.results")
    flags = parser.parse_args()
    runs: dict[tuple[str, str], list[Path]] = {}
    for cells in sorted(flags.out.glob(f"*/{CELLS}")):
        part, length, _ = cells.parent.name.split("-", 2)
        runs.setdefault((part, length), []).append(cells.parent)
    for (part, length), folders in runs.items():
        if not (rows := rows_of(folders)):
            continue
        print(caption(part, int(length), len(rows[0].results)))
        print(_TABLES.get(part, scores_table)(rows), end="\n\n")


if __name__ == "__main__":
    main()
