"""Shows the progress of a run on standard error: the current sample, the results so far, and the time left."""

from __future__ import annotations

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero_kv.printing import console


class RunBar(Progress):
    """A bar over the missing results, each weighted by its prompt's length.

    Nothing is drawn if standard error is not a terminal.

    Args:
        results: the number of missing results.
        work: their total weight.
        done: results from earlier starts of the run.
    """

    def __init__(self, results: int, work: int, done: int, *, shown: bool = True) -> None:
        terminal = console(stderr=True)
        super().__init__(
            TextColumn("{task.fields[results]}/{task.fields[of]}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.description}"),
            console=terminal,
            disable=not (shown and terminal.is_terminal),
        )
        self._results = done
        # Estimate from an hour's results; the default window of 30 seconds can be shorter than one result.
        self.speed_estimate_period = 3600.0
        self._task = self.add_task("", total=max(work, 1), results=done, of=done + results)

    def begin(self, sample: str, methods: str) -> None:
        """Show the current sample and its methods."""
        self.update(self._task, description=escape(f"{sample}  {methods}"))

    def advance_by(self, work: int, results: int) -> None:
        """Count finished results."""
        self._results += results
        self.update(self._task, advance=work, results=self._results)
