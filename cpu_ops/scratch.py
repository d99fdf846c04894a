"""Scratch memory of kernels on cache-line boundaries: a whole vector that crosses one costs two loads."""

import numpy as np
from numba import njit


@njit
def scratch(rows, columns):
    """A [rows, columns] float32 array of zeros that begins on a 64-byte boundary."""
    size = rows * columns
    memory = np.zeros(size + 16, np.float32)
    start = (-(memory.ctypes.data // 4)) % 16
    return memory[start : start + size].reshape(rows, columns)
