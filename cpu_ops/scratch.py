"""Kernel buffers aligned to cache lines: loading a vector across a boundary costs two loads."""

import math

import numpy as np
from numba import njit, types

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


# Without the signature, Numba would compile it for every pair of a kernel's constants.
@njit(types.Array(types.float32, 2, "C")(types.int64, types.int64), cache=True, nogil=True)
def scratch(rows, columns):
    """Returns a [rows, columns] float32 array of zeros that begins on a 64-byte boundary."""
    size = rows * columns
    memory = np.zeros(size + 16, np.float32)
    start = (-(memory.ctypes.data // 4)) % 16
    return memory[start : start + size].reshape(rows, columns)
