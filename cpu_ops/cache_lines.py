"""Arrays that begin on cache lines: loading a vector across a boundary costs two loads."""

import math

import numpy as np

LINE = 64
"""Bytes of a cache line."""


def on_lines(shape: tuple[int, ...], dtype: np.dtype | type[np.generic]) -> np.ndarray:
    """Returns an uninitialised array, as `numpy.empty`, that begins on a cache line."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return from_line(np.empty(size + LINE, np.uint8), size).view(dtype).reshape(shape)


def from_line(memory: np.ndarray, nbytes: int) -> np.ndarray:
    """Returns a view of `nbytes` bytes of memory [bytes] uint8 from its first cache-line boundary on."""
    skipped = -memory.ctypes.data % LINE
    return memory[skipped : skipped + nbytes]


def neighbours_on_lines(array: np.ndarray) -> np.ndarray:
    """Returns the array C-contiguous, as `numpy.ascontiguousarray`; a copy begins on a cache line."""
    if array.flags.c_contiguous:
        return array
    copy = on_lines(array.shape, array.dtype)
    copy[:] = array
    return copy
