"""Sparse gather: scores of single tokens anywhere in the blocks of a pool, and weighted sums of their values.

It serves methods that choose single tokens. The caller turns scores into weights, by a softmax or by one that counts
some tokens more than once.
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import accumulate_rows, prefetch, score_rows
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, NumberFormat, storage_of
from hetero_kv.cpu_ops.threads import on_threads
from hetero_kv.cpu_ops.tiles import tiles_for

_AT_ONCE = 64
"""Tokens in a thread's unit of work."""
_AHEAD = 8
"""How many tokens ahead the kernel prefetches, because hardware cannot predict their addresses."""
NO_OFFSETS = np.empty((0, 0, 0), np.uint16)


def token_scores(
    q: np.ndarray, keys: np.ndarray, table: np.ndarray, positions: np.ndarray, counts: np.ndarray,
    key_offsets: np.ndarray | None = None, threads: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns the inner products of queries and the keys of listed tokens.

    q: [rows, lists, queries, k_dim] float32; a row's lists are grouped by kv head, equally many for each.
    keys: [num_blocks, kv_heads, block_size, k_dim] of a storage type (`cpu_ops.storage`). table: [rows, blocks] int32,
    ids of a sequence's blocks. positions: [rows, lists, n] int32, tokens of the sequence. counts: [rows, lists] int32,
    entries of each list in use. key_offsets: as in `attention.attend_blocks`. threads: number of threads (None: Numba's
    setting).

    Returns [rows, lists, queries, n] float32, -inf after a list's end. Raises ValueError or TypeError for arrays that
    do not fit together, IndexError for positions and blocks out of range.
    """
    region, kernel_dtype = _planned("score", q.shape, keys.shape, keys.dtype, key_offsets is not None)
    _require_inside(q.shape[:2], keys, table, positions, counts)
    scores = np.empty((*q.shape[:3], positions.shape[2]), np.float32)
    offsets = NO_OFFSETS if key_offsets is None else key_offsets
    arrays = q, keys.view(kernel_dtype), offsets, table, positions, counts, scores
    on_threads(threads, call_region, "score tokens", kernel_dtype.name, region, arrays)
    return scores


def token_values(
    weights: np.ndarray, values: np.ndarray, table: np.ndarray, positions: np.ndarray, counts: np.ndarray,
    threads: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns the weighted sums of the values of listed tokens: [rows, lists, queries, v_dim] float32.

    weights: [rows, lists, queries, n] float32; those after a list's end are not read. values: [num_blocks, kv_heads,
    block_size, v_dim] of a storage type. Other arguments and errors are those of `token_scores`.
    """
    storage = storage_of(values.dtype)
    v_dim = values.shape[3] * storage.group
    shape = *weights.shape[:3], v_dim
    region, kernel_dtype = _planned("add", shape, values.shape, values.dtype, False)
    _require_inside(weights.shape[:2], values, table, positions, counts)
    if weights.shape[3] != positions.shape[2]:
        raise ValueError(f"weights {weights.shape} and positions {positions.shape} must have one length")
    parts = max(1, -(-positions.shape[2] // _AT_ONCE))
    sums = np.empty((parts, *shape), np.float32)
    arrays = weights, values.view(kernel_dtype), table, positions, counts, sums
    on_threads(threads, call_region, "add tokens", kernel_dtype.name, region, arrays)
    return sums.sum(axis=0) if parts > 1 else sums[0]


def _require_inside(
    lists: tuple[int, ...], blocks: np.ndarray, table: np.ndarray, positions: np.ndarray, counts: np.ndarray
) -> None:
    if positions.shape[:2] != lists or counts.shape != lists or len(table) != lists[0] or lists[1] % blocks.shape[1]:
        raise ValueError(
            f"positions {positions.shape}, counts {counts.shape} and table {table.shape} must be of the lists {lists}, "
            f"as many for each of {blocks.shape[1]} kv heads"
        )
    if counts.size and not (counts.min() >= 0 and counts.max() <= positions.shape[2]):
        raise IndexError(f"counts range over {counts.min()}..{counts.max()}; lists hold 0..{positions.shape[2]}")
    if table.size and not (table.min() >= 0 and table.max() < len(blocks)):
        raise IndexError(f"table names blocks {table.min()}..{table.max()}, of a pool of {len(blocks)}")
    tokens = table.shape[1] * blocks.shape[2]
    used = positions[np.arange(positions.shape[2]) < counts[:, :, None]]
    if used.size and not (used.min() >= 0 and used.max() < tokens):
        raise IndexError(f"positions range over {used.min()}..{used.max()}, in blocks of {tokens} tokens")


@lru_cache(maxsize=4096)
def _planned(
    what: str, vectors: tuple[int, ...], blocks: tuple[int, ...], dtype: np.dtype, offset: bool
) -> tuple[int, np.dtype]:
    """Returns the region for vectors [rows, lists, queries, dim] and blocks of this dtype, and the view's dtype."""
    storage = storage_of(dtype)
    if len(vectors) != 4 or len(blocks) != 4 or blocks[3] * storage.group != vectors[3] or min(vectors[2:]) < 1:
        raise ValueError(f"queries, dim {vectors[2:]} do not fit blocks {blocks} of {storage.name}")
    made = _scoring(isa(), storage.name, vectors[2], vectors[3], offset)
    if what == "add":
        made = _adding(isa(), storage.name, vectors[2], vectors[3])
    return address_of(made), storage.kernel_dtype


def compile_for(storage: NumberFormat, value_storage: NumberFormat, queries: int, k_dim: int, v_dim: int) -> None:
    """Compile the kernels of one shape, or load them from Numba's on-disk cache, before the first token needs them."""
    _scoring(isa(), storage.name, queries, k_dim, False)
    _adding(isa(), value_storage.name, queries, v_dim)


_REAL4 = types.Array(types.float32, 4, "C")
_TABLE, _POSITIONS = types.Array(types.int32, 2, "C"), types.Array(types.int32, 3, "C")


@region_arguments("score tokens")
def _scoring_arguments(numbers: str) -> tuple[Any, ...]:
    """(q, keys, key_offsets, table, positions, counts, scores)."""
    pool, offsets = types.Array(from_dtype(np.dtype(numbers)), 4, "C"), types.Array(types.uint16, 3, "C")
    return _REAL4, pool, offsets, _TABLE, _POSITIONS, _TABLE, _REAL4


@region_arguments("add tokens")
def _adding_arguments(numbers: str) -> tuple[Any, ...]:
    """(weights, values, table, positions, counts, sums): sums [parts, rows, lists, queries, v_dim]."""
    pool = types.Array(from_dtype(np.dtype(numbers)), 4, "C")
    return _REAL4, pool, _TABLE, _POSITIONS, _TABLE, types.Array(types.float32, 5, "C")


@device_function(forceinline=True)
def _place(table, row, position, pool, head):
    """Returns where a position of a sequence lies for a kv head, as indices of blocks and of tokens of one head."""
    kv_heads, block_size = pool.shape[1], pool.shape[2]
    block = np.int64(table[row, position // block_size]) * kv_heads + head
    return block, block * block_size + position % block_size


@cache
def _scoring(isa: str, storage: str, queries: int, dim: int, offset: bool) -> Any:
    """Compile a thread's share of `token_scores`. Numba's disk cache keys it by the constants below, plain values."""
    tiles, units = tiles_for(isa, queries, 1), STORAGE_TYPES[storage].units(dim)
    lanes, tile_queries, row_size, width = tiles.lanes, tiles.queries, tiles.row, tiles.number * tiles.row
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        q, keys, key_offsets, table, positions, counts, scores = arguments_at("score tokens", numbers, arguments)
        kv_heads = keys.shape[1]
        rows, lists, n = positions.shape
        parts = (n + _AT_ONCE - 1) // _AT_ONCE
        total = rows * lists * parts
        found, shifts = scratch(1, width + lanes), scratch(1, width + lanes)
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            index, first = item // parts, item % parts * _AT_ONCE
            row, each = index // lists, index % lists
            head = each * kv_heads // lists
            q_at = index * (queries * dim)
            stop = min(first + _AT_ONCE, n)
            end = min(stop, np.int64(counts[row, each]))
            for entry in range(first, end):
                if entry + _AHEAD < end:
                    _, ahead = _place(table, row, positions[row, each, entry + _AHEAD], keys, head)
                    prefetch(keys, ahead * units, units)
                block, place = _place(table, row, positions[row, each, entry], keys, head)
                k_at = place * units
                score_rows(
                    lanes, storage, dim, queries, tile_queries, 1, row_size, q, q_at, keys, k_at, found, 0, row_size
                )
                if offset:
                    score_rows(
                        lanes, "float16", dim, queries, tile_queries, 1, row_size, q, q_at,
                        key_offsets, block * dim, shifts, 0, row_size,
                    )  # fmt: skip
                    for lane in range(width):
                        found[0, lane] += shifts[0, lane]
                for g in range(queries):
                    scores[row, each, g, entry] = found[0, g // tile_queries * row_size + g % tile_queries]
            for g in range(queries):
                for entry in range(max(first, end), stop):
                    scores[row, each, g, entry] = -np.inf
        return np.int64(0 * code_version)

    return score


@cache
def _adding(isa: str, storage: str, queries: int, dim: int) -> Any:
    """Compile a thread's share of `token_values`."""
    tiles, units = tiles_for(isa, queries, 1), STORAGE_TYPES[storage].units(dim)
    lanes, tile_queries, row_size, width = tiles.lanes, tiles.queries, tiles.row, tiles.number * tiles.row
    columns = tiles.columns
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def add(thread, threads, arguments):
        weights, values, table, positions, counts, sums = arguments_at("add tokens", numbers, arguments)
        kv_heads = values.shape[1]
        rows, lists = positions.shape[:2]
        parts = sums.shape[0]
        total = rows * lists * parts
        weight, summed = scratch(1, width), scratch(queries, dim)
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            index, part = item // parts, item % parts
            row, each = index // lists, index % lists
            head = each * kv_heads // lists
            summed[:] = 0
            end = min((part + 1) * _AT_ONCE, np.int64(counts[row, each]))
            for entry in range(part * _AT_ONCE, end):
                if entry + _AHEAD < end:
                    _, ahead = _place(table, row, positions[row, each, entry + _AHEAD], values, head)
                    prefetch(values, ahead * units, units)
                v_at = _place(table, row, positions[row, each, entry], values, head)[1] * units
                for g in range(queries):
                    weight[0, g // tile_queries * row_size + g % tile_queries] = weights[row, each, g, entry]
                accumulate_rows(
                    lanes, storage, dim, queries, tile_queries, row_size, columns, weight, 0, row_size, 1,
                    values, v_at, 1, summed, values, v_at, 0, 0,
                )  # fmt: skip
            for g in range(queries):
                for d in range(dim):
                    sums[part, row, each, g, d] = summed[g, d]
        return np.int64(0 * code_version)

    return add
