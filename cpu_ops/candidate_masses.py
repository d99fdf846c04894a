"""The attention that candidates receive, from the scores of their keys: as they are stored, or from coarse copies."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.estimated_masses import log_sum_exp
from cpu_ops.exponential import tanh
from cpu_ops.kernel_address import address_of
from cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from cpu_ops.scratch import scratch
from cpu_ops.simd import score_rows, score_tile
from cpu_ops.storage import STORAGE_TYPES, numbers_of, pool_arrays, storage_of
from cpu_ops.tiles import tiles_for


@region_arguments("candidates")
def arguments(numbers: str) -> tuple[Any, ...]:
    """Of the regions: (q, keys, means, table, positions, scale, softcap, weights, masses).

    numbers: as kernels view keys and means, as in "uint8,uint16". q: [rows, kv_heads, group, k_dim] float32. keys:
    [num_blocks, kv_heads, block_size, k_dim], or how they differ from means [num_blocks, kv_heads, 1 or more, k_dim],
    of which the first of a block counts. table: [rows, blocks] int32, full blocks in the pool. positions: [rows, 1 or
    kv_heads, n] int32, the candidates among those; entries below 0 are none. scale, softcap: as
    `attention.attend_blocks`. weights, masses: [rows, kv_heads, group, blocks] float32; at the candidates' positions
    the log-sum-exp of the scores of all keys of each is written to both.
    """
    pool, means = pool_arrays(numbers)
    real4, real = types.Array(types.float32, 4, "C"), types.float64
    int3, int2 = (types.Array(types.int32, dims, "C") for dims in (3, 2))
    return real4, pool, means, int2, int3, real, real, real4, real4


def region_for(
    q: tuple[int, ...],
    keys: tuple[int, ...],
    means: tuple[int, ...],
    dtype: np.dtype,
    mean_dtype: np.dtype,
    differ: bool,
) -> int:
    """The address of the region for arrays of these shapes; differ: whether keys differ from means by what they hold.

    Raises ValueError where they do not fit together.
    """
    storage, kind = storage_of(dtype), storage_of(mean_dtype)
    if {keys[1], means[1]} != {q[1]} or {keys[3] * storage.group, means[3] * kind.group} != {q[3]}:
        raise ValueError(f"keys {keys} and means {means} do not fit q {q}: kv_heads and k_dim must be equal")
    return address_of(_region(isa(), storage.name, kind.name, differ, q[2], q[3], keys[2]))


@cache
def _region(instructions: str, storage: str, kind: str, differ: bool, group: int, k_dim: int, block_size: int) -> Any:
    tiles = tiles_for(instructions, group, block_size)
    lanes, full_tiles, tile_queries, rest_queries, row_size, tile_tokens, _ = tiles
    full_queries, num_tiles = full_tiles * tile_queries, tiles.number
    # A tile's scores: rows of all keys of the block, and what whole vectors write behind them.
    tile_scores = block_size * row_size + lanes
    units, mean_units = STORAGE_TYPES[storage].units(k_dim), STORAGE_TYPES[kind].units(k_dim)
    numbers = numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[kind])
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        q, keys, means, table, positions, scale, softcap, weights, masses = arguments_at(
            "candidates", numbers, arguments
        )
        rows, kv_heads = q.shape[:2]
        lists, candidates = positions.shape[1:]
        scores, of_query = scratch(num_tiles, tile_scores), np.empty((group, block_size), np.float32)
        of_mean = np.zeros((1, group), np.float32)
        total = rows * kv_heads * candidates
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            place, index = item % candidates, item // candidates
            row, head = index // kv_heads, index % kv_heads
            position = positions[row, min(head, lists - 1), place]
            if position < 0:
                continue
            block, q_at = np.int64(table[row, position]), index * (group * k_dim)
            k_at = (block * kv_heads + head) * (block_size * units)
            m_at = (block * kv_heads + head) * (means.shape[2] * mean_units)
            for tile in range(full_tiles):
                for t in range(0, block_size, tile_tokens):
                    score_rows(
                        lanes, storage, k_dim, tile_queries, tile_tokens, row_size,
                        q, q_at + tile * (tile_queries * k_dim), keys, k_at + t * units,
                        scores, tile * tile_scores + t * row_size,
                    )  # fmt: skip
                if differ:
                    score_tile(
                        lanes, "dot", kind, k_dim, tile_queries, q, q_at + tile * (tile_queries * k_dim), means, m_at,
                        of_mean, tile * tile_queries, 1,
                    )  # fmt: skip
            if rest_queries > 0:
                for t in range(0, block_size, tile_tokens):
                    score_rows(
                        lanes, storage, k_dim, rest_queries, tile_tokens, row_size, q, q_at + full_queries * k_dim,
                        keys, k_at + t * units, scores, full_tiles * tile_scores + t * row_size,
                    )  # fmt: skip
                if differ:
                    score_tile(
                        lanes, "dot", kind, k_dim, rest_queries, q, q_at + full_queries * k_dim, means, m_at,
                        of_mean, full_queries, 1,
                    )  # fmt: skip
            for g in range(group):
                tile, lane = g // tile_queries, g % tile_queries
                for t in range(block_size):
                    score = (scores[tile, t * row_size + lane] + of_mean[0, g]) * np.float32(scale)
                    of_query[g, t] = np.float32(softcap) * tanh(score / np.float32(softcap)) if softcap > 0 else score
                mass = log_sum_exp(of_query[g])
                weights[row, head, g, position] = mass
                masses[row, head, g, position] = mass
        return np.int64(0 * code_version)

    return score
