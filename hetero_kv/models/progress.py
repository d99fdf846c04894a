"""Progress of fetching and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from hetero_kv.printing import console

ProgressReport = Callable[[str, int, int], None]
"""Called with the activity, the bytes done so far and the total bytes."""


class _OfAKnownSize(ProgressColumn):
    """Shows another column once the total is known; until then nothing, instead of question marks."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.total else Text("")


class _Speed(ProgressColumn):
    """Bytes per second, shown from the first bytes on."""

    def render(self, task: Task) -> RenderableType:
        speed = task.finished_speed or task.speed or (task.completed / task.elapsed if task.elapsed else 0)
        return Text(f"{decimal(int(speed))}/s" if speed else "", style="progress.data.speed")


class TimeLeft(ProgressColumn):
    """The remaining time at the average speed so far: "0:00:41"."""

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time or task.elapsed
        if not task.total or not task.completed or not elapsed:
            return Text("")
        left = max(0.0, task.total - task.completed) * elapsed / task.completed
        return Text(str(timedelta(seconds=round(left))), style="progress.remaining")


@contextmanager
def progress_line(name: str) -> Iterator[ProgressReport]:
    """Show a progress line for `name` on standard error, and clear it when the context ends.

    Nothing is written if standard error is no terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _OfAKnownSize(DownloadColumn()),
        _OfAKnownSize(_Speed()),
        TimeLeft(),
    )
    terminal = console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as line:
        task = line.add_task(name, total=None)
        doing = ""

        def report(activity: str, done: int, total: int) -> None:
            nonlocal doing
            if activity != doing:
                # Another activity has another speed.
                doing = activity
                line.reset(task, description=f"{name}: {activity}")
            line.update(task, completed=done, total=total or None)

        yield report


@contextmanager
def reporting(name: str, progress: ProgressReport | None) -> Iterator[ProgressReport]:
    """The caller's `progress`, or a progress line for `name` if it is None."""
    if progress is not None:
        yield progress
        return
    with progress_line(name) as report:
        yield report
