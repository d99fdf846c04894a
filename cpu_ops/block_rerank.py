"""Block rerank: the attention mass of candidate blocks, from scores of their stored keys or of coarse copies."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, log2, row_softcap
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import prefetch, score_rows, score_tile
from hetero_kv.cpu_ops.softmax_rows import rows_exp2, rows_most
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of, pool_arrays, storage_of
from hetero_kv.cpu_ops.tiles import tiles_for

_AHEAD = 2
"""How many candidates ahead the kernel prefetches."""


@region_arguments("candidates")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments: (q, keys, means, table, positions, scale, softcap, weights, masses, token_scores).

    numbers: the dtypes as which kernels view keys and means, as in "uint8,uint16". q: [rows, kv_heads, group, k_dim]
    float32. keys: [num_blocks, kv_heads, block_size, k_dim], the keys or their differences to means [num_blocks,
    kv_heads, 1 or more, k_dim], of which each block's first is used. table: [rows, blocks] int32, ids of full blocks.
    positions: [rows, 1 or kv_heads, n] int32, the candidates in `table`; negative entries are padding, and n = 0 means
    all blocks. scale, softcap: as in `attention.attend_blocks`. weights, masses: [rows, kv_heads, group, blocks]
    float32. The region writes at the candidates' positions: to masses, the log-sum-exp of the scores of a block's keys;
    to weights, for coarse copies only (`int4_key_scores`), the log-sum-exp if every key were the block's mean.
    token_scores: [rows, kv_heads, group, n * block_size] float32, written: the scores of the candidates' keys, in the
    order of `positions`; or of length 0. Weights and masses may be of length 0 too: they are not written then.
    """
    pool, means = pool_arrays(numbers)
    real4, real = types.Array(types.float32, 4, "C"), types.float64
    int3, int2 = (types.Array(types.int32, dims, "C") for dims in (3, 2))
    return real4, pool, means, int2, int3, real, real, real4, real4, real4


def region_for(
    q: tuple[int, ...],
    keys: tuple[int, ...],
    means: tuple[int, ...],
    dtype: np.dtype,
    mean_dtype: np.dtype,
    differ: bool,
) -> int:
    """Returns the address of the region for arrays of these shapes.

    differ: whether `keys` stores differences to means. Raises ValueError for shapes that do not fit together.
    """
    storage, kind = storage_of(dtype), storage_of(mean_dtype)
    if {keys[1], means[1]} != {q[1]} or {keys[3] * storage.group, means[3] * kind.group} != {q[3]}:
        raise ValueError(f"keys {keys} and means {means} do not fit q {q}: kv_heads and k_dim must be equal")
    return address_of(_region(isa(), storage.name, kind.name, differ, q[2], q[3], keys[2]))


@cache
def _region(instructions: str, storage: str, kind: str, differ: bool, group: int, k_dim: int, block_size: int) -> Any:
    tiles = tiles_for(instructions, group, block_size)
    lanes, _, tile_queries, _, row_size, tile_tokens, _ = tiles
    num_tiles = tiles.number
    vectors = -(-(block_size * row_size) // lanes)
    # A tile's scores: one row per key of the block, and padding for whole vectors.
    tile_scores = vectors * lanes + lanes
    units, mean_units = STORAGE_TYPES[storage].units(k_dim), STORAGE_TYPES[kind].units(k_dim)
    numbers = numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[kind])
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        q, keys, means, table, positions, scale, softcap, _weights, masses, token_scores = arguments_at(
            "candidates", numbers, arguments
        )
        rows, kv_heads = q.shape[:2]
        lists, everything = positions.shape[1], positions.shape[2] == 0
        candidates = table.shape[1] if everything else positions.shape[2]
        factor = np.float32(scale / softcap) if softcap > 0 else np.float32(scale * LOG2_E)
        scaled_q, scores = scratch(group, k_dim), scratch(num_tiles, tile_scores)
        most, totals = np.empty((2, num_tiles, lanes), np.float32)
        nothing, of_mean = np.full((num_tiles, lanes), -np.inf, np.float32), np.zeros((1, group), np.float32)
        # Lists differ in length, so threads divide the candidates of all lists evenly.
        listed = np.int64(0)
        for index in range(rows * kv_heads):
            for place in range(candidates):
                listed += everything or positions[index // kv_heads, min(index % kv_heads, lists - 1), place] >= 0
        first, last, number, before = listed * thread // threads, listed * (thread + 1) // threads, 0, np.int64(-1)
        for item in range(rows * kv_heads * candidates):
            place, index = item % candidates, item // candidates
            row, head = index // kv_heads, index % kv_heads
            position = place if everything else np.int64(positions[row, min(head, lists - 1), place])
            if position < 0:
                continue
            number += 1
            if number <= first or number > last:
                continue
            if index != before:
                before = index
                for g in range(group):
                    for d in range(k_dim):
                        scaled_q[g, d] = q[row, head, g, d] * factor
            block = np.int64(table[row, position])
            k_at = (block * kv_heads + head) * (block_size * units)
            following = min(place + _AHEAD, candidates - 1)
            ahead = following if everything else np.int64(positions[row, min(head, lists - 1), following])
            if ahead >= 0:
                following = np.int64(table[row, ahead]) * kv_heads + head
                prefetch(keys, following * (block_size * units), block_size * units)
                if differ:
                    prefetch(means, following * (means.shape[2] * mean_units), mean_units)
            for t in range(0, block_size, tile_tokens):
                score_rows(
                    lanes, storage, k_dim, group, tile_queries, tile_tokens, row_size, scaled_q, 0,
                    keys, k_at + t * units, scores, t * row_size, tile_scores,
                )  # fmt: skip
            if differ:
                m_at = (block * kv_heads + head) * (means.shape[2] * mean_units)
                score_tile(lanes, "dot", kind, k_dim, group, tile_queries, 1, scaled_q, 0, means, m_at, of_mean, 0, 1)
            totals[:] = 0
            for tile in range(num_tiles):
                if softcap > 0:
                    for t in range(block_size):
                        for g in range(tile * tile_queries, min(group, (tile + 1) * tile_queries)):
                            scores[tile, t * row_size + g - tile * tile_queries] += of_mean[0, g]
                    row_softcap(scores, tile, block_size * row_size, np.float32(softcap) * LOG2_E)
                if token_scores.shape[3] > 0:
                    for g in range(tile * tile_queries, min(group, (tile + 1) * tile_queries)):
                        shift = np.float32(0) if softcap > 0 else of_mean[0, g]
                        for t in range(block_size):
                            found = scores[tile, t * row_size + g - tile * tile_queries] + shift
                            token_scores[row, head, g, place * block_size + t] = found * LN_2
                if masses.shape[3] == 0:
                    continue
                scores[tile, block_size * row_size : vectors * lanes] = -np.inf
                at: Any = tile * lanes
                rows_most(lanes, row_size, scores, tile * tile_scores, lanes, vectors, nothing, at, most, at)
                rows_exp2(lanes, scores, tile * tile_scores, lanes, vectors, most, at, totals, at)
            for g in range(group if masses.shape[3] > 0 else 0):
                tile, lane = g // tile_queries, g % tile_queries
                sum_of_powers = np.float32(0)
                for same in range(lane, lanes, row_size):
                    sum_of_powers += totals[tile, same]
                shift = np.float32(0) if softcap > 0 else of_mean[0, g]
                masses[row, head, g, position] = (most[tile, lane] + shift + log2(sum_of_powers)) * LN_2
        return np.int64(0 * code_version)

    return score
