"""Memory for packed weights: arrays large enough for huge pages, shared by many matrices.

A token reads every weight once, in order. With pages of 4 KB it waits for an address translation at each page. numpy
requests huge pages only for arrays of 4 MB or more, and most matrices are smaller.
"""

import threading

import numpy as np

from hetero_kv.cpu_ops.cache_lines import LINE, from_line, on_lines

_CHUNK_BYTES = 32 << 20


class WeightArena:
    """Allocates parts of large arrays. An array is freed when its last part is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def empty(self, nbytes: int) -> np.ndarray:
        """Returns an uninitialised array [nbytes] uint8 that begins on a cache line."""
        if nbytes * 2 > _CHUNK_BYTES:
            return on_lines((nbytes,), np.uint8)
        with self._lock:
            if self._used + nbytes + LINE > self._chunk.size:
                self._chunk, self._used = np.empty(_CHUNK_BYTES, np.uint8), 0
            part = from_line(self._chunk[self._used :], nbytes)
            self._used = part.ctypes.data + nbytes - self._chunk.ctypes.data
        return part


WEIGHTS = WeightArena()
