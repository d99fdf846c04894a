"""Memory of whole pages, which the operating system gives as it is written, and which files can be laid into."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

# As mmap(2) has it, on Linux and macOS; Python's module does not say it.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
# Below this huge pages are of no use.
_LARGE = 1 << 22


def untouched(size: int) -> np.ndarray:
    """`size` bytes, page-aligned, [size] uint8: backed by memory as they are written, by huge pages where there are.

    Raises MemoryError where there is no room to reserve.
    """
    try:
        pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"Unable to allocate {size:,} bytes") from error
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8, count=size)


def lay(target: np.ndarray, descriptor: int, offset: int) -> tuple[int, int]:
    """Let bytes of `untouched` memory be those of a file: whole pages are mapped, and read when they are touched.

    What is written to them later is this process's own. The file must keep its length.

    Args:
        target: [bytes] uint8, a part of such memory.
        offset: of the first of them in the file; nothing is mapped unless it lies in a page as `target` does.

    Returns how many bytes at the beginning and at the end are yet to be read: all of them where nothing is mapped.

    Raises OSError where the system refuses.
    """
    address, size = target.ctypes.data, len(target)
    before, mapped = whole_pages(address, size, offset)
    if not mapped:
        return size, 0
    got = _mmap()(
        address + before, mapped, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor,
        offset + before,
    )  # fmt: skip
    if got == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return before, size - before - mapped


def whole_pages(address: int, size: int, offset: int) -> tuple[int, int]:
    """What of `size` bytes at an address can be pages of a file, in which they begin at `offset`.

    Returns how many bytes come before the first such page, and how many the pages have: 0 where there are none.
    """
    before = -address % mmap.PAGESIZE
    pages = (size - before) // mmap.PAGESIZE * mmap.PAGESIZE
    return (size, 0) if (address - offset) % mmap.PAGESIZE or pages <= 0 else (before, pages)


def will_need(address: int, size: int) -> None:
    """Have the system read those pages of files that `size` bytes at an address lie in, and do not wait for it."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    # Advice: what the system makes of it changes no byte.
    _madvise()(start, address + size - start, mmap.MADV_WILLNEED)


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    return function
