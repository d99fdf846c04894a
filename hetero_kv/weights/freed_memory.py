"""Memory that was freed and is still the process's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], object] | None:
    """glibc's own; other systems give memory back by themselves, or have no way to ask."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def give_back_freed_memory() -> None:
    """Give the operating system what was freed. glibc keeps it: after a conversion of weights more than they take."""
    trim = _trim()
    if trim is not None:
        trim(0)
