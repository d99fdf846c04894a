"""Signals: Ctrl-C ends the answer in progress; SIGTERM and SIGHUP end the program in order."""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupt:
    """Remembers a Ctrl-C; a second one takes effect at once, without waiting for the next chunk or token."""

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


_ENDING = signal.SIGTERM, signal.SIGHUP


class Terminated(KeyboardInterrupt):
    """SIGTERM ends the program, or the terminal has closed (SIGHUP).

    Attributes:
        status: the exit status for the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def exit_status_of(error: BaseException | None) -> int | None:
    """The exit status if an error, or one in its chain of contexts, means that the program ends; None if not.

    Code that restores a closed terminal fails with EIO, after SIGHUP or just before it arrives.
    """
    status, seen = None, error
    while seen is not None:
        if isinstance(seen, Terminated):
            return seen.status
        if isinstance(seen, (OSError, termios.error)) and seen.args[:1] == (errno.EIO,) and not os.isatty(0):
            status = 128 + signal.SIGHUP
        seen = seen.__context__
    return status


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Within this context the first SIGTERM or SIGHUP raises Terminated; later ones are ignored, so that a save ends.

    A signal that was ignored before stays ignored, as under `nohup`.
    """
    handled = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    with _handled_by(end, handled):
        yield


@contextmanager
def not_terminated() -> Iterator[None]:
    """Within this context neither of these signals ends the program, so that saving completes."""
    with _handled_by(signal.SIG_IGN, _ENDING):
        yield


@contextmanager
def _handled_by(handler: Any, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can take signals
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
