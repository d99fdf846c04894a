"""Seconds that a run may take in all: what would take longer is left out, and what does is broken off."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(Exception):
    """The time that there was is over."""


class Budget:
    """A number of seconds from now on.

    Args:
        seconds: of them.
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
        """Within this context TimeUp is raised when nothing is left; in a process's main thread alone."""

        def ring(number: int, frame: FrameType | None) -> None:
            raise TimeUp

        if not self.left:
            raise TimeUp
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
