"""Page-aligned memory that the operating system backs as it is written, and that files can be mapped into."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

# The value of mmap(2) on Linux and macOS, which Python's mmap module does not export.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
# Below this size huge pages do not pay.
_LARGE = 1 << 22
_HUGE = 1 << 21
# So many bytes at the beginning have small pages: backing a huge page takes a millisecond, and a model has hundreds of
# reservations, of which a short conversation writes no more.
_SMALL = 1 << 17


def reserve(size: int) -> np.ndarray:
    """Reserve `size` bytes, page-aligned, [size] uint8; backed by memory when written.

    The pages are huge if possible, but for those at the beginning.

    Raises MemoryError if the reservation fails.
    """
    is_large = size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE")
    try:
        pages = mmap.mmap(-1, max(1, size + _HUGE * is_large), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"Unable to allocate {size:,} bytes") from error
    if not is_large:
        return np.frombuffer(pages, dtype=np.uint8, count=size)
    whole = np.frombuffer(pages, dtype=np.uint8)
    first = (-_SMALL - whole.ctypes.data) % _HUGE
    pages.madvise(mmap.MADV_NOHUGEPAGE, 0, first + _SMALL)
    pages.madvise(mmap.MADV_HUGEPAGE, first + _SMALL)
    return whole[first : first + size]


def map_file(target: np.ndarray, descriptor: int, offset: int) -> tuple[int, int]:
    """Map a file into bytes of `reserve` memory: whole pages are mapped, and read when they are touched.

    Later writes stay private to this process. The file must keep its length.

    Args:
        target: [bytes] uint8, a part of such memory.
        offset: file offset of the first byte; nothing is mapped unless it has the alignment of `target` within a page.

    Returns how many bytes at the beginning and at the end the caller still has to read: all of them if nothing is
    mapped.

    Raises OSError if the system refuses.
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
    """Which of `size` bytes at an address can be mapped pages of a file, whose data begins at `offset`.

    Returns the bytes before the first such page, and the bytes of the pages, 0 if there are none.
    """
    before = -address % mmap.PAGESIZE
    pages = (size - before) // mmap.PAGESIZE * mmap.PAGESIZE
    return (size, 0) if (address - offset) % mmap.PAGESIZE or pages <= 0 else (before, pages)


def will_need(address: int, size: int) -> None:
    """Have the system read the file pages that `size` bytes at an address overlap; does not wait."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    # Advice only: it changes no byte, so its result is ignored.
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
