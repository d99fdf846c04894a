"""The progress of a run, on standard error: what is at work, how much is done, how long the rest takes."""

from __future__ import annotations

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero_kv.printing import console


class RunBar(Progress):
    """A bar over the results that are still missing, each weighted by its prompt's length.

    Nothing is drawn where standard error is not a terminal.

    Args:
        results: how many are missing.
        work: their weight in all.
        done: results that earlier starts of the run left.
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
        # Time left follows from recent results; a bar's default window of 30 seconds is less than one may take.
        self.speed_estimate_period = 3600.0
        self._task = self.add_task("", total=max(work, 1), results=done, of=done + results)

    def begin(self, sample: str, methods: str) -> None:
        """Show what is at work."""
        self.update(self._task, description=escape(f"{sample}  {methods}"))

    def advance_by(self, work: int, results: int) -> None:
        """Count results that are done."""
        self._results += results
        self.update(self._task, advance=work, results=self._results)
