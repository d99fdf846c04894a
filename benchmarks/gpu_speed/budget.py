"""A time budget for a run: measurements that would exceed it are skipped, and one that does is aborted."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(Exception):
    """The time budget is used up."""


class Budget:
    """A time budget that starts now.

    Args:
        seconds: its length.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left; none below 0."""
        return max(0.0, self.seconds - self.spent)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Within this context TimeUp is raised when no time is left, or when the process is asked to end (SIGTERM).

        Then none is left afterwards. Only in a process's main thread.
        """

        def ring(number: int, frame: FrameType | None) -> None:
            self.seconds = min(self.seconds, self.spent)
            raise TimeUp

        if not self.left:
            raise TimeUp
        before = {each: signal.signal(each, ring) for each in (signal.SIGALRM, signal.SIGTERM)}
        signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for each, handler in before.items():
                signal.signal(each, handler)
