"""Tokens that collide with a query in several hash tables, by hash codes stored with the blocks."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.threads import on_threads


def collisions(
    query_codes: np.ndarray, codes: np.ndarray, table: np.ndarray, least: int, threads: int | None = None
) -> np.ndarray:
    """Returns whether a token's codes equal the query's in at least `least` hash tables.

    query_codes: [rows, kv_heads, group, tables] uint16, the queries' codes. codes: [num_blocks, kv_heads, tables,
    block_size] uint16. table: [rows, blocks] int32, ids of the searched blocks. threads: number of threads (None:
    Numba's setting).

    Returns [rows, kv_heads, group, blocks * block_size] uint8, 1 or 0. Raises ValueError or TypeError for arrays that
    do not fit together, IndexError for blocks outside the pool.
    """
    rows, kv_heads, group, tables = query_codes.shape
    if codes.ndim != 4 or codes.shape[1:3] != (kv_heads, tables) or len(table) != rows:
        raise ValueError(
            f"query codes {query_codes.shape}, codes {codes.shape} and table {table.shape} do not fit together"
        )
    if table.size and not (table.min() >= 0 and table.max() < len(codes)):
        raise IndexError(f"table names blocks {table.min()}..{table.max()}, of a pool of {len(codes)}")
    found = np.empty((rows, kv_heads, group, table.shape[1] * codes.shape[3]), np.uint8)
    arrays = query_codes, codes, table, least, found
    on_threads(threads, call_region, "count collisions", "", address_of(_counting()), arrays)
    return found


@region_arguments("count collisions")
def _arguments(_: str) -> tuple[Any, ...]:
    """(query_codes, codes, table, least, found), as in `collisions`; found is written."""
    codes = types.Array(types.uint16, 4, "C")
    return codes, codes, types.Array(types.int32, 2, "C"), types.int64, types.Array(types.uint8, 4, "C")


@cache
def _counting() -> Any:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def count(thread, threads, arguments):
        query_codes, codes, table, least, found = arguments_at("count collisions", "", arguments)
        rows, kv_heads, group, tables = query_codes.shape
        blocks, block_size = table.shape[1], codes.shape[3]
        total = rows * kv_heads * blocks
        counted = np.empty(block_size, np.uint16)
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            index, place = item // blocks, item % blocks
            row, head = index // kv_heads, index % kv_heads
            of_block = codes[table[row, place], head]
            for query in range(group):
                counted[:] = 0
                for each in range(tables):
                    code, of_table = query_codes[row, head, query, each], of_block[each]
                    for token in range(block_size):
                        counted[token] += np.uint16(of_table[token] == code)
                for token in range(block_size):
                    found[row, head, query, place * block_size + token] = np.uint8(counted[token] >= least)
        return np.int64(0 * code_version)

    return count
