"""Scratch memory of kernels on cache-line boundaries: a whole vector that crosses one costs two loads."""

import numpy as np
from numba import njit, types


# With a signature: else Numba would compile it for every pair of numbers that a kernel's constants are.
@njit(types.Array(types.float32, 2, "C")(types.int64, types.int64), cache=True, nogil=True)
def scratch(rows, columns):
    """A [rows, columns] float32 array of zeros that begins on a 64-byte boundary."""
    size = rows * columns
    memory = np.zeros(size + 16, np.float32)
    start = (-(memory.ctypes.data // 4)) % 16
    return memory[start : start + size].reshape(rows, columns)
