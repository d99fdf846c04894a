"""Rotary position embedding of queries and keys in DRAM."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.threads import kernel_threads

# Up to this many bytes one thread finishes before several have started.
_SMALL = 1 << 18


def rotate_rows(
    vectors: np.ndarray,
    rotated: np.ndarray,
    entries: tuple[int, int],
    cos: np.ndarray,
    sin: np.ndarray,
    position: int,
    channels: tuple[int, bool],
    threads: int | None = None,
) -> None:
    """Write vectors to the same entries of `rotated`, with pairs of channels (a, b) rotated to
    (a * cos - b * sin, b * cos + a * sin).

    vectors, rotated: [rows, heads, entries, dim] float32; rotated is C-contiguous. entries: first and end of the
    entries to rotate. cos, sin: [positions, pairs] float32, one row per position, C-contiguous; the first entry is at
    `position`. channels: (offset, interleaved): the first rotated channel, and whether pair i consists of channels (2i,
    2i + 1) from there on instead of (i, i + pairs); other channels are copied. threads: number of threads for many
    entries (None: Numba's setting).

    Raises ValueError for arrays that do not fit together or lack these entries or positions.
    """
    first, end = entries
    offset, interleaved = channels
    fits = vectors.shape[:2] == rotated.shape[:2] and vectors.shape[3] == rotated.shape[3] and cos.shape == sin.shape
    if not fits or not 0 <= offset <= vectors.shape[3] - 2 * cos.shape[1]:
        raise ValueError(
            f"vectors {vectors.shape}, rotated {rotated.shape}, cos {cos.shape} and sin {sin.shape} from channel "
            f"{offset} on do not fit together"
        )
    if not 0 <= first <= end <= min(vectors.shape[2], rotated.shape[2]) or not 0 <= position <= len(cos) + first - end:
        raise ValueError(
            f"entries {first} to {end} from position {position} on are not all in vectors {vectors.shape}, rotated "
            f"{rotated.shape} and cos {cos.shape}"
        )
    size = vectors.shape[0] * vectors.shape[1] * (end - first) * vectors.shape[3] * 4
    arrays = vectors, rotated, first, end, cos, sin, position, offset, interleaved
    if size <= _SMALL:
        _kernel(False)(*arrays, 1)
    else:
        with kernel_threads(threads) as used:
            _kernel(True)(*arrays, used)


@cache
def _kernel(parallel: bool) -> Any:
    code_version = CODE_VERSION

    @njit(parallel=parallel, cache=True, nogil=True)
    def rotate(vectors, rotated, first, end, cos, sin, position, offset, interleaved, threads):
        rows, heads, _, dim = vectors.shape
        pairs, count = cos.shape[1], end - first
        total = rows * heads * count
        for thread in prange(threads):
            for index in range(total * thread // threads, total * (thread + 1) // threads):
                row, head = index // count // heads, index // count % heads
                entry = first + index % count
                angle = position + index % count
                for d in range(offset):
                    rotated[row, head, entry, d] = vectors[row, head, entry, d]
                for d in range(offset + 2 * pairs, dim):
                    rotated[row, head, entry, d] = vectors[row, head, entry, d]
                if interleaved:
                    for pair in range(pairs):
                        one = offset + 2 * pair
                        a, b = vectors[row, head, entry, one], vectors[row, head, entry, one + 1]
                        rotated[row, head, entry, one] = a * cos[angle, pair] - b * sin[angle, pair]
                        rotated[row, head, entry, one + 1] = b * cos[angle, pair] + a * sin[angle, pair]
                else:
                    for pair in range(pairs):
                        one, other = offset + pair, offset + pairs + pair
                        a, b = vectors[row, head, entry, one], vectors[row, head, entry, other]
                        rotated[row, head, entry, one] = a * cos[angle, pair] - b * sin[angle, pair]
                        rotated[row, head, entry, other] = b * cos[angle, pair] + a * sin[angle, pair]
        return code_version

    return rotate


@cache
def compile_kernels() -> None:
    """Compile the kernels, or load them from Numba's on-disk cache, before the first token needs them."""
    vectors, angles = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1), np.float32)
    for parallel in (False, True):
        _kernel(parallel)(vectors, vectors, 0, 1, angles, angles, 0, 0, False, 1)
