"""Entries of a cache that an eviction policy bounds: appending a token, evicting entries, and attention received.

Keys and values are arrays [rows, kv_heads, capacity, dim] with free capacity after their entries. Functions that only
copy entries accept 16-bit numbers as int16.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.exponential import LOG2_E, row_exp2, row_softcap
from hetero_kv.cpu_ops.threads import kernel_threads

# Up to this many bytes one thread finishes before several have started.
_SMALL = 1 << 18
# Keys whose scores a thread computes at once.
_TILE = 256


@njit(cache=True, nogil=True)
def append_token(new_keys, new_values, keys, values, positions, place, position):
    """Write one token of every row at index `place`, after the entries.

    new_keys: [rows, kv_heads, 1, k_dim], new_values: [rows, kv_heads, 1, v_dim], of any strides, in the dtype of keys
    [rows, kv_heads, capacity, k_dim] and values [rows, kv_heads, capacity, v_dim]. positions: [rows, kv_heads,
    capacity] int64; `position`, the token's position in its sequence, is written to it.

    Raises IndexError for a place outside the capacity; nothing is written then.
    """
    rows, kv_heads, capacity, k_dim = keys.shape
    if place < 0 or place >= capacity:
        raise IndexError("place lies outside the capacity")
    for row in range(rows):
        for head in range(kv_heads):
            for d in range(k_dim):
                keys[row, head, place, d] = new_keys[row, head, 0, d]
            for d in range(values.shape[3]):
                values[row, head, place, d] = new_values[row, head, 0, d]
            positions[row, head, place] = position


def gather_entries(
    sources: tuple[np.ndarray, np.ndarray, np.ndarray],
    index: np.ndarray,
    targets: tuple[np.ndarray, np.ndarray, np.ndarray],
    threads: int | None = None,
) -> None:
    """Copy the entries at `index` to the beginning of other arrays.

    sources, targets: keys [rows, kv_heads, capacity, k_dim], values [rows, kv_heads, capacity, v_dim] and positions
    [rows, kv_heads, capacity], C-contiguous, each pair of one dtype; capacities may differ. index: [rows or 1,
    kv_heads or 1, count] int64, one list for all rows or heads or one for each. threads: number of threads for large
    copies (None: Numba's setting).

    Raises IndexError for an index outside the source's capacity.
    """
    count = index.shape[2]
    entries = targets[0].shape[0] * targets[0].shape[1] * count
    size = entries * (sources[0].shape[3] * sources[0].itemsize + sources[1].shape[3] * sources[1].itemsize)
    if count > min(part.shape[2] for part in targets):
        raise IndexError(f"{count} entries do not fit into a capacity of {targets[0].shape[2]}")
    if size <= _SMALL:
        fits = _gather(False)(*sources, index, *targets, 1)
    else:
        with kernel_threads(threads) as used:
            fits = _gather(True)(*sources, index, *targets, used)
    if not fits:
        raise IndexError(f"index must lie in 0..{sources[0].shape[2] - 1}; it is {index.min()}..{index.max()}")


@cache
def _gather(parallel: bool) -> Any:
    code_version = CODE_VERSION

    @njit(parallel=parallel, cache=True, nogil=True)
    def gather(keys, values, positions, index, new_keys, new_values, new_positions, threads):
        rows, kv_heads, capacity, k_dim = keys.shape
        v_dim, count = values.shape[3], index.shape[2]
        for place in index.flat:
            if place < 0 or place >= capacity:
                return code_version < 0
        total = rows * kv_heads * count
        for thread in prange(threads):
            for entry in range(total * thread // threads, total * (thread + 1) // threads):
                head, place = entry // count, entry % count
                row, head = head // kv_heads, head % kv_heads
                source = index[min(row, index.shape[0] - 1), min(head, index.shape[1] - 1), place]
                for d in range(k_dim):
                    new_keys[row, head, place, d] = keys[row, head, source, d]
                for d in range(v_dim):
                    new_values[row, head, place, d] = values[row, head, source, d]
                new_positions[row, head, place] = positions[row, head, source]
        return code_version >= 0

    return gather


@njit(cache=True, nogil=True)
def gather_numbers(numbers, index):
    """Returns numbers [rows, kv_heads, entries] at `index` [rows or 1, kv_heads or 1, count] int64, without checks.

    Returns [rows, kv_heads, count].
    """
    rows, kv_heads = numbers.shape[:2]
    count = index.shape[2]
    found = np.empty((rows, kv_heads, count), numbers.dtype)
    for row in range(rows):
        for head in range(kv_heads):
            for place in range(count):
                source = index[min(row, index.shape[0] - 1), min(head, index.shape[1] - 1), place]
                found[row, head, place] = numbers[row, head, source]
    return found


@njit(cache=True, nogil=True)
def all_but_lowest(scores):
    """Returns the indices of all entries but the lowest-scored one, ascending; of equal ones the last is dropped.

    scores: [rows, lists, entries], at least one entry; a NaN is lower than any number.

    Returns [rows, lists, entries - 1] int64.
    """
    rows, lists, entries = scores.shape
    index = np.empty((rows, lists, entries - 1), np.int64)
    for row in range(rows):
        for each in range(lists):
            lowest = 0
            for entry in range(1, entries):
                score, least = scores[row, each, entry], scores[row, each, lowest]
                if (score <= least and not np.isnan(least)) or np.isnan(score):
                    lowest = entry
            for entry in range(entries - 1):
                index[row, each, entry] = entry + (entry >= lowest)
    return index


def received_attention(
    q: np.ndarray,
    lse: np.ndarray,
    keys: np.ndarray,
    count: int,
    scale: float,
    softcap: float = 0.0,
    threads: int | None = None,
) -> np.ndarray:
    """Returns the attention that each of the first `count` keys receives from one query per row.

    q: [rows, kv_heads, group, k_dim] float32. lse: [rows, kv_heads, group] float32, the log-sum-exp of each query's
    scores. keys: [rows, kv_heads, capacity, k_dim] float32, C-contiguous. scale multiplies the scores; softcap c > 0
    then turns them into c * tanh(score / c). threads: number of threads for many keys (None: Numba's setting).

    Returns [rows, kv_heads, group, count] float32. Raises ValueError for shapes that do not fit together.
    """
    rows, kv_heads, group, k_dim = q.shape
    fits = keys.shape[:2] == (rows, kv_heads) and keys.shape[3] == k_dim and lse.shape == q.shape[:3]
    if not fits or not 0 <= count <= keys.shape[2]:
        raise ValueError(f"q {q.shape}, lse {lse.shape} and {count} of keys {keys.shape} do not fit together")
    received = np.empty((rows, kv_heads, group, count), np.float32)
    if rows * kv_heads * count * k_dim * 4 <= _SMALL:
        _received(False)(q, lse, keys, scale, softcap, received, 1)
    else:
        with kernel_threads(threads) as used:
            _received(True)(q, lse, keys, scale, softcap, received, used)
    return received


@cache
def _received(parallel: bool) -> Any:
    code_version = CODE_VERSION

    @njit(
        parallel=parallel, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"}
    )  # fmt: skip
    def attend(q, lse, keys, scale, softcap, received, threads):
        rows, kv_heads, group, k_dim = q.shape
        count = received.shape[3]
        tiles = (count + _TILE - 1) // _TILE
        total = rows * kv_heads * tiles
        factor = np.float32(scale / softcap) if softcap > 0 else np.float32(scale * LOG2_E)
        for thread in prange(threads):
            scores = np.empty((1, _TILE), np.float32)
            query = np.empty(k_dim, np.float32)
            for task in range(total * thread // threads, total * (thread + 1) // threads):
                row, head = task // tiles // kv_heads, task // tiles % kv_heads
                first = task % tiles * _TILE
                size = min(_TILE, count - first)
                for g in range(group):
                    for d in range(k_dim):
                        query[d] = q[row, head, g, d] * factor
                    for key in range(size):
                        score = np.float32(0)
                        for d in range(k_dim):
                            score += query[d] * keys[row, head, first + key, d]
                        scores[0, key] = score
                    if softcap > 0:
                        row_softcap(scores, 0, size, np.float32(softcap) * LOG2_E)
                    row_exp2(scores, 0, size, lse[row, head, g] * LOG2_E)
                    for key in range(size):
                        received[row, head, g, first + key] = scores[0, key]
        return code_version

    return attend


@cache
def compile_for(dtype: np.dtype) -> None:
    """Compile the kernels for keys and values of `dtype` (int16 for numbers of 16 bits), or load them from Numba's
    on-disk cache, before the first token needs them."""
    vectors, positions = np.zeros((1, 1, 2, 1), dtype), np.zeros((1, 1, 2), np.int64)
    append_token(vectors[:, :, :1], vectors[:, :, :1], vectors, vectors, positions, 0, 0)
    scores = np.zeros((1, 1, 2), np.float32)
    index = all_but_lowest(scores)
    gather_numbers(scores, index)
    for parallel in (False, True):
        _gather(parallel)(vectors, vectors, positions, index, vectors, vectors, positions, 1)
        if dtype == np.float32:
            _received(parallel)(vectors[:, :, :1], vectors[:, :, :1, 0], vectors, 1.0, 0.0, vectors[:, :, :1], 1)
