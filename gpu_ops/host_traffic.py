"""Detects CUDA work that makes the host wait or uses the bus, with the line of code that caused it."""

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

#: Beginning of torch's warnings of synchronizing operations.
_WAITS = "called a synchronizing CUDA operation"
# torch's one-time warning about the debug mode itself.
_PROTOTYPE_WARNING = "Synchronization debug mode is a prototype"
#: Modules whose frames are skipped when the causing line is determined.
PASSED_THROUGH = ("torch", "warnings", __name__)
# torch's debug mode applies to the whole process.
_one_at_a_time = threading.RLock()


class HostTraffic(TorchDispatchMode):
    """The result of `traffic_observed`.

    Attributes:
        first: the first wait or copy, and the line that caused it; None if there was none.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None
        self._observes = True
        self._thread = threading.get_ident()
        self._showwarning = warnings.showwarning

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        # torch does not warn of asynchronous copies.
        if _crosses(function, args, out):
            self._record("copies from or to the device")
        elif kwargs and kwargs.get("pin_memory"):
            self._record("page-locks memory")
        return out

    def show(self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        """Replaces `warnings.showwarning`; records torch's warnings of waits in this thread instead of showing them."""
        if not str(message).startswith(_WAITS):
            self._showwarning(message, category, filename, lineno, file, line)
        elif threading.get_ident() == self._thread:
            self._record("waits for the device")

    def _record(self, what: str) -> None:
        if self._observes and self.first is None:
            self.first = f"{what} ({_causing_line()})"

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """A context in which waits and copies are not recorded."""
        before, self._observes = self._observes, False
        try:
            yield
        finally:
            self._observes = before


@contextmanager
def traffic_observed() -> Iterator[HostTraffic]:
    """A context in which CUDA work runs as usual, and the first wait or copy over the bus is recorded.

    Waits for a whole device, or for an event, are not recorded, because torch does not report them.
    """
    with _one_at_a_time, warnings.catch_warnings():
        traffic, before = HostTraffic(), torch.cuda.get_sync_debug_mode()
        warnings.filterwarnings("ignore", message=_PROTOTYPE_WARNING)
        warnings.filterwarnings("always", message=_WAITS)
        warnings.showwarning = traffic.show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with traffic:
                yield traffic
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _crosses(function: Any, args: Any, out: Any) -> bool:
    """Whether an operator has copied between host and device memory."""
    if function is torch.ops.aten.copy_.default:
        return args[0].device.type != args[1].device.type
    return function is torch.ops.aten._to_copy.default and args[0].device.type != out.device.type


def _causing_line() -> str:
    """file:line of the innermost frame outside torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(PASSED_THROUGH):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
