"""Scores of all tokens of blocks from a few components of their keys, stored component by component.

A block stores each component of all its tokens contiguously, so that a step reads only the components that it uses
(SparQ, Ribar et al. 2023, arXiv:2312.04985, section 4).
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import accumulate_rows
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.threads import on_threads
from hetero_kv.cpu_ops.tiles import tiles_for


def component_scores(
    weights: np.ndarray, components: np.ndarray, columns: np.ndarray, table: np.ndarray, threads: int | None = None
) -> np.ndarray:
    """Returns, for each token, the sum over n components of the query's weight times the key's component.

    weights: [rows, kv_heads, group, n] float32. components: [rows, kv_heads, n] int32, their indices, ascending.
    columns: [num_blocks, kv_heads, k, block_size] of an ungrouped storage type (`cpu_ops.storage`). table: [rows,
    blocks] int32, ids of the scored blocks. threads: number of threads (None: Numba's setting).

    Returns [rows, kv_heads, group, blocks * block_size] float32. Raises ValueError or TypeError for arrays that do not
    fit together, IndexError for blocks and components out of range.
    """
    rows, kv_heads, group, n = weights.shape
    region, kernel_dtype = _planned(group, columns.shape, columns.dtype)
    if components.shape != (rows, kv_heads, n) or columns.shape[1] != kv_heads or len(table) != rows:
        raise ValueError(
            f"weights {weights.shape}, components {components.shape}, columns {columns.shape} and table {table.shape} "
            "do not fit together"
        )
    if components.size and not (components.min() >= 0 and components.max() < columns.shape[2]):
        raise IndexError(f"components range over {components.min()}..{components.max()}, of {columns.shape[2]}")
    if table.size and not (table.min() >= 0 and table.max() < len(columns)):
        raise IndexError(f"table names blocks {table.min()}..{table.max()}, of a pool of {len(columns)}")
    # The inner loop reads the queries' weights of a component contiguously.
    pitch = tiles_for(isa(), group, 1)
    by_component = np.zeros((rows, kv_heads, n, pitch.number * pitch.row), np.float32)
    for query in range(group):
        by_component[..., query // pitch.queries * pitch.row + query % pitch.queries] = weights[:, :, query]
    scores = np.empty((rows, kv_heads, group, table.shape[1] * columns.shape[3]), np.float32)
    arrays = by_component, components, columns.view(kernel_dtype), table, scores
    on_threads(threads, call_region, "score components", kernel_dtype.name, region, arrays)
    return scores


@lru_cache(maxsize=4096)
def _planned(group: int, columns: tuple[int, ...], dtype: np.dtype) -> tuple[int, np.dtype]:
    storage = storage_of(dtype)
    if storage.group != 1 or len(columns) != 4 or group < 1:
        raise ValueError(f"columns {columns} of {storage.name} are no components of single numbers")
    return address_of(_scoring(isa(), storage.name, group, columns[3])), storage.kernel_dtype


@region_arguments("score components")
def _arguments(numbers: str) -> tuple[Any, ...]:
    """(weights [rows, kv_heads, n, pitch], components, columns, table, scores)."""
    real4, pool = types.Array(types.float32, 4, "C"), types.Array(from_dtype(np.dtype(numbers)), 4, "C")
    return real4, types.Array(types.int32, 3, "C"), pool, types.Array(types.int32, 2, "C"), real4


@cache
def _scoring(isa: str, storage: str, group: int, block_size: int) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    tiles = tiles_for(isa, group, 1)
    lanes, tile_queries, row_size, width = tiles.lanes, tiles.queries, tiles.row, tiles.number * tiles.row
    columns_at_once = tiles.columns
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        weights, components, columns, table, scores = arguments_at("score components", numbers, arguments)
        rows, kv_heads, n = components.shape
        kept, blocks = columns.shape[2], table.shape[1]
        total = rows * kv_heads * blocks
        sums = scratch(group, block_size)
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            index, place = item // blocks, item % blocks
            row, head = index // kv_heads, index % kv_heads
            block = np.int64(table[row, place])
            sums[:] = 0
            entry = 0
            while entry < n:
                component = np.int64(components[row, head, entry])
                run = 1
                while entry + run < n and components[row, head, entry + run] == component + run:
                    run += 1
                at = ((block * kv_heads + head) * kept + component) * block_size
                w_at = (index * n + entry) * width
                accumulate_rows(
                    lanes, storage, block_size, group, tile_queries, width, columns_at_once, weights, w_at, row_size, 1,
                    columns, at, run, sums, columns, at, 0, 0,
                )  # fmt: skip
                entry += run
            for g in range(group):
                for t in range(block_size):
                    scores[row, head, g, place * block_size + t] = sums[g, t]
        return np.int64(0 * code_version)

    return score
