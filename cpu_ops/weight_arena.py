"""Memory that packed weights lie in, many in one: large enough for the operating system to back it by huge pages.

A token reads every weight once, in order. Over pages of 4 KB it stops at each for the translation of an address; numpy
asks for huge pages, but for arrays of 4 MB and more alone, and most matrices are smaller.
"""

import threading

import numpy as np

from cpu_ops.scratch import LINE, from_line, on_lines

_CHUNK_BYTES = 32 << 20


class WeightArena:
    """Hands out parts of large arrays. An array is given back when the last of its parts is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def empty(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8, uninitialised, that begins on a cache line."""
        if nbytes * 2 > _CHUNK_BYTES:
            return on_lines((nbytes,), np.uint8)
        with self._lock:
            if self._used + nbytes + LINE > self._chunk.size:
                self._chunk, self._used = np.empty(_CHUNK_BYTES, np.uint8), 0
            part = from_line(self._chunk[self._used :], nbytes)
            self._used = part.ctypes.data + nbytes - self._chunk.ctypes.data
        return part


WEIGHTS = WeightArena()
