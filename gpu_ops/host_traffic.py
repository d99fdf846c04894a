"""Work on a CUDA device that has the host wait, or that goes over the bus: noticed as it runs, by who asked for it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What torch says of an operation that waits, where it is asked to warn of them.
_WAITS = "called a synchronizing CUDA operation"
# Said of the asking itself, once.
_OF_ASKING = "Synchronization debug mode is a prototype"
#: Modules whose lines ask for nothing of their own.
PASSED_THROUGH = ("torch", "warnings", __name__)
# torch warns the whole process, or nobody.
_one_at_a_time = threading.RLock()


class HostTraffic(TorchDispatchMode):
    """What `noticed` finds.

    Attributes:
        first: the first wait or copy, and the line that asked for it; None where there was none.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None
        self._is_noticing = True
        self._thread = threading.get_ident()
        self._showwarning = warnings.showwarning

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        # Of those that wait for nothing torch does not warn.
        if _crosses(function, args, out):
            self._note("copies from or to the device")
        elif kwargs and kwargs.get("pin_memory"):
            self._note("page-locks memory")
        return out

    def show(self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        """As `warnings.showwarning`; what torch says of waits is noted instead, where it is of this thread."""
        if not str(message).startswith(_WAITS):
            self._showwarning(message, category, filename, lineno, file, line)
        elif threading.get_ident() == self._thread:
            self._note("waits for the device")

    def _note(self, what: str) -> None:
        if self._is_noticing and self.first is None:
            self.first = f"{what} ({_asking_line()})"

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Within this context work may wait and copy."""
        before, self._is_noticing = self._is_noticing, False
        try:
            yield
        finally:
            self._is_noticing = before


@contextmanager
def noticed() -> Iterator[HostTraffic]:
    """Within this context a CUDA device's work runs as ever, and the first wait or copy over the bus is noticed.

    Waits for a whole device, or for an event, are not: nobody tells of them.
    """
    with _one_at_a_time, warnings.catch_warnings():
        traffic, before = HostTraffic(), torch.cuda.get_sync_debug_mode()
        warnings.filterwarnings("ignore", message=_OF_ASKING)
        warnings.filterwarnings("always", message=_WAITS)
        warnings.showwarning = traffic.show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with traffic:
                yield traffic
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _crosses(function: Any, args: Any, out: Any) -> bool:
    """Whether an operator has copied between the host's memory and a device's."""
    if function is torch.ops.aten.copy_.default:
        return args[0].device.type != args[1].device.type
    return function is torch.ops.aten._to_copy.default and args[0].device.type != out.device.type


def _asking_line() -> str:
    """file:line of the innermost frame that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(PASSED_THROUGH):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
