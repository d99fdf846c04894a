"""Kernel buffers that begin on a cache line."""

import numpy as np
from numba import njit, types


# Without the signature, Numba would compile it for every pair of a kernel's constants.
@njit(types.Array(types.float32, 2, "C")(types.int64, types.int64), cache=True, nogil=True)
def scratch(rows, columns):
    """Returns a [rows, columns] float32 array of zeros that begins on a 64-byte boundary."""
    size = rows * columns
    memory = np.zeros(size + 16, np.float32)
    start = (-(memory.ctypes.data // 4)) % 16
    return memory[start : start + size].reshape(rows, columns)
