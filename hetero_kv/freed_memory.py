"""Memory that was freed and is still the process's: glibc's own ways; other systems are left as they are."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# The largest threshold that glibc takes, and comes to by itself, and how many mappings it makes.
_LARGEST_THRESHOLD, _MAPPINGS = 32 << 20, 65536
# By which users say themselves what is to be kept.
_SAID = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"


@cache
def _library() -> Any:
    """The C library; None where it is not glibc."""
    try:
        return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    except (OSError, TypeError):
        return None


def give_back_freed_memory() -> None:
    """Give the operating system what was freed. glibc keeps it: after a conversion of weights more than they take."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within this context, what is freed stays for the next who asks, of any size; the caller gives it back.

    What a layer makes of a prompt's chunk is freed when the next one is made, which is as large. By itself glibc gives
    what is large back at once, and gets it anew: a fault for each page, which the system clears first. Where something
    is raised, it is given back at once.
    """
    library = _library()
    if library is None or any(os.environ.get(name) for name in _SAID):
        yield
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, -1)
    try:
        yield
    except BaseException:
        library.malloc_trim(0)
        raise
    finally:
        # A threshold that was set no longer grows by itself: these are what it grows to.
        library.mallopt(_MMAP_MAX, _MAPPINGS)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
