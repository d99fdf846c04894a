"""How far fetching and loading have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hetero_kv.printing import console

ProgressReport = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done so far and the bytes in all."""


@contextmanager
def progress_line(name: str) -> Iterator[ProgressReport]:
    """A line on standard error that shows the work on `name` and is gone when the work is done.

    Nothing is written where standard error is not a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    terminal = console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as line:
        task = line.add_task(name, total=None)

        def report(activity: str, done: int, total: int) -> None:
            line.update(task, description=f"{name}: {activity}", completed=done, total=total or None)

        yield report


@contextmanager
def reporting(name: str, progress: ProgressReport | None) -> Iterator[ProgressReport]:
    """The caller's own report, or a progress line for `name` where the caller gave none."""
    if progress is not None:
        yield progress
        return
    with progress_line(name) as report:
        yield report
