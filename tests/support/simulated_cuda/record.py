"""Launches, copies and waits of the device, in order, each with the line that caused it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).parents[3]
#: Folders whose lines cause something: the project's own, then models'.
_OURS = str(_ROOT / "hetero_kv") + "/"
_MODELS = ("/transformers/models/", "/transformers/integrations/", "/transformers/generation/")


@dataclass(frozen=True)
class Launch:
    """A kernel.

    Attributes:
        name: aten's name of the operator, or a Triton kernel's.
        line: file:line that caused it, of the project or of a model.
    """

    name: str
    line: str


@dataclass(frozen=True)
class Copy:
    """Bytes between DRAM and the device.

    Attributes:
        to_device: else from it.
        is_pinned: the host's side is page-locked.
        is_blocking: the host waits until it is done.
    """

    nbytes: int
    to_device: bool
    is_pinned: bool
    is_blocking: bool
    line: str


@dataclass(frozen=True)
class Wait:
    """The host waits for the device.

    Attributes:
        cause: what for.
    """

    cause: str
    line: str


class Record:
    """All of it, since it was last cleared.

    Attributes:
        everything: in order.
    """

    def __init__(self) -> None:
        self.everything: list[Launch | Copy | Wait] = []

    def clear(self) -> None:
        self.everything.clear()

    @property
    def launches(self) -> list[Launch]:
        return [each for each in self.everything if isinstance(each, Launch)]

    @property
    def copies(self) -> list[Copy]:
        return [each for each in self.everything if isinstance(each, Copy)]

    @property
    def waits(self) -> list[Wait]:
        return [each for each in self.everything if isinstance(each, Wait)]

    @property
    def own_launches(self) -> list[Launch]:
        """Launches caused by a line of the project, not by one of a model."""
        return [launch for launch in self.launches if is_own(launch.line)]

    @property
    def pageable(self) -> list[Copy]:
        """Copies of which the host's side is not page-locked."""
        return [copy for copy in self.copies if not copy.is_pinned]

    def by_line(self, what: str) -> list[tuple[str, int]]:
        """Lines with the number of their `what` (launches, copies, waits), the most frequent first."""
        return Counter(each.line for each in getattr(self, what)).most_common()


def is_own(line: str) -> bool:
    """Whether a line that `causing_line` gave is the project's."""
    return line.startswith("hetero_kv/")


def causing_line() -> str:
    """file:line of the innermost frame of the project or of a model; `elsewhere` where there is neither."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = _file_that_counts(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _file_that_counts(name: str) -> str | None:
    """A file's name in the record; None if it belongs neither to the project nor to a model."""
    if name.startswith(_OURS):
        return name[len(str(_ROOT)) + 1 :]
    return name[name.index("/transformers/") + 1 :] if any(folder in name for folder in _MODELS) else None
