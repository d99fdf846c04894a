"""How far fetching and loading have come."""

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
"""Called with what is being done, the bytes done so far and the bytes in all."""


class _OfAKnownSize(ProgressColumn):
    """Another column, where the size of the whole is known; until then nothing, and not question marks."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.total else Text("")


class _Speed(ProgressColumn):
    """Bytes per second, from the first ones."""

    def render(self, task: Task) -> RenderableType:
        speed = task.finished_speed or task.speed or (task.completed / task.elapsed if task.elapsed else 0)
        return Text(f"{decimal(int(speed))}/s" if speed else "", style="progress.data.speed")


class TimeLeft(ProgressColumn):
    """How long the rest takes at the speed so far: "0:00:41", as soon as anything is done."""

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time or task.elapsed
        if not task.total or not task.completed or not elapsed:
            return Text("")
        left = max(0.0, task.total - task.completed) * elapsed / task.completed
        return Text(str(timedelta(seconds=round(left))), style="progress.remaining")


@contextmanager
def progress_line(name: str) -> Iterator[ProgressReport]:
    """A line on standard error that shows the work on `name` and is gone when the work is done.

    Nothing is written where standard error is not a terminal.
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
                # Another kind of work has another speed.
                doing = activity
                line.reset(task, description=f"{name}: {activity}")
            line.update(task, completed=done, total=total or None)

        yield report


@contextmanager
def reporting(name: str, progress: ProgressReport | None) -> Iterator[ProgressReport]:
    """The caller's own report, or a progress line for `name` where the caller gave none."""
    if progress is not None:
        yield progress
        return
    with progress_line(name) as report:
        yield report
