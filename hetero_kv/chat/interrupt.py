"""Ctrl-C while an answer is made: it ends the answer, not the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Remembers that Ctrl-C was pressed; a second one does not wait for the next chunk or token to notice it."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Within this context the first Ctrl-C sets `requested`, the next raises KeyboardInterrupt."""
        self.requested = False
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can take signals
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
