"""Controls what glibc's malloc does with freed memory; does nothing on other systems."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# glibc's largest threshold, which it also reaches by itself, and its default number of mappings.
_LARGEST_THRESHOLD, _MAPPINGS = 32 << 20, 65536
# Environment variables by which users tune malloc themselves.
_USER_SETTINGS = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"


@cache
def _library() -> Any:
    """The C library; None where it is not glibc."""
    try:
        return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    except (OSError, TypeError):
        return None


def give_back_freed_memory() -> None:
    """Return freed memory to the operating system.

    glibc keeps it; after a conversion of weights that can be more than the weights' own size.
    """
    library = _library()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within this context, freed memory of any size stays with the process for reuse; the caller returns it.

    A layer frees the intermediate tensors of a prompt's chunk when it makes those of the next, which are as large. By
    default glibc returns large ones to the system at once and maps them again, and the system clears each page on its
    first fault. An exception returns the memory at once.
    """
    library = _library()
    if library is None or any(os.environ.get(name) for name in _USER_SETTINGS):
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
        # A threshold that was set no longer grows by itself: set the values that it grows to.
        library.mallopt(_MMAP_MAX, _MAPPINGS)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
