"""Attention over lists: of blocks of a pool, or of single tokens anywhere in these blocks.

Both use the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1). They differ in the
addresses that they read: a block's tokens are consecutive, and single tokens are gathered. Threads divide the work by
tokens, across sequences, heads and blocks. Partial results of a list that several threads share are merged by their
log-sum-exps, which is exact (as in Flash-Decoding).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.kernel_address import called_as
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import accumulate_rows, accumulate_rows_at, prefetch, score_rows
from hetero_kv.cpu_ops.softmax_rows import rows_exp2, rows_most
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of, pool_arrays
from hetero_kv.cpu_ops.tiles import TileSizes, columns_apart, tiles_for
from hetero_kv.cpu_ops.work_division import edge_buffers, keep_part, list_starts, merge_edges, token_starts

TOO_SHORT = -4
"""Status: a list has fewer tokens than required."""
_AT_ONCE = 64
"""Single tokens that are scored before their values are added."""
_AHEAD = 8
"""How many single tokens ahead the kernel prefetches, because hardware cannot predict their addresses."""
_VALUE_TILE = 32
"""Tokens of a block whose values are accumulated before the partial outputs are stored to memory."""


def _arrays(numbers: str) -> tuple[Any, ...]:
    """The types of (q, keys, values, key_offsets, block_ids, block_counts, block_lengths)."""
    int3, int2, int1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
    return types.Array(types.float32, 5, "C"), *pool_arrays(numbers), OFFSETS, int3, int2, int1


OFFSETS = types.Array(types.uint16, 3, "C")
"""Bits of float16, subtracted from the keys of each block and kv head (`attention.attend_blocks`)."""
_OUT, _LSE = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")


@region_arguments("attend lists")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments, for pools whose memory kernels view as `numbers` (`storage.numbers_of`).

    (starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap, edges, edge_sums,
    edge_most, edge_total, out, lse): starts from `work_division.list_starts`. A thread writes lists that it computes
    alone to out and lse, and partial results of shared lists to its two edges (`work_division.merge_edges`); `edges`
    is -1 for an unused edge.
    """
    int1, real2 = types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C")
    factors = types.float64, types.float64
    return (int1, *_arrays(numbers), *factors, int1, _LSE, real2, real2, _OUT, _LSE)


@called_as("attend lists")
def signature(numbers: str) -> Any:
    """The kernels' signature: (run, region, least, q, keys, values, key_offsets, block_ids, block_counts,
    block_lengths, scale, softcap, threads, out, lse).

    run: `parallel_region.all_threads()`. region: its address. least: tokens that every list must have. q: [rows, q_len,
    kv_heads, group, k_dim]. block_ids, block_counts, block_lengths: as in `attention.attend_blocks`; where lists are of
    single tokens, block_ids [rows, 1 or kv_heads, n] int32 holds block id * block_size + offset of each token, and
    block_lengths is not read. out: [rows, kv_heads, q_len * group, v_dim]; lse: the same without the last dimension.
    Returns a status; a negative one reports an error (`cpu_ops.work_division`, TOO_SHORT).
    """
    integer, real = types.int64, types.float64
    return types.int64(integer, integer, integer, *_arrays(numbers), real, real, integer, _OUT, _LSE)


@cache
def kernel_for(numbers: str, by_token: bool = False) -> Any:
    """Compile the kernel for pools viewed as `numbers` (as in `signature`), or load it from Numba's on-disk cache.

    by_token: whether lists are of single tokens, whose places the caller has checked.
    """
    code_version = CODE_VERSION

    @njit(signature(numbers), cache=True, nogil=True, error_model="numpy")
    def attend_lists(
        run, region, least, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
        threads, out, lse,
    ):  # fmt: skip
        if by_token:
            starts = token_starts(block_counts, q.shape[2])
        else:
            starts = list_starts(block_ids, block_counts, block_lengths, q.shape[2], keys.shape[2])
        if starts[0] < 0:
            return starts[0]
        if least > 0:
            for index in range(starts.size - 1):
                if starts[index + 1] - starts[index] < least:
                    return np.int64(TOO_SHORT)
        queries, v_dim = out.shape[2:]
        edges, edge_sums, edge_most, edge_total = edge_buffers(threads, queries, v_dim)
        region_args = (
            starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        )  # fmt: skip
        run_region("attend lists", numbers, run, region, threads, region_args)
        merge_edges(edges, edge_sums, edge_most, edge_total, out, lse)
        return np.int64(0 * code_version)

    return attend_lists


def region(
    isa: str, storage: str, value_storage: str, group: int, k_dim: int, v_dim: int, block_size: int, softcapped: bool,
    offset: bool, by_token: bool = False,
) -> Any:  # fmt: skip
    """Compile a thread's share for one shape.

    offset: whether `key_offsets` are used. by_token: as in `kernel_for`. Lists of blocks have one region for all block
    sizes that are divided into the same tiles.
    """
    tiles, size = tiles_for(isa, group, 1 if by_token else block_size), block_size if by_token else 0
    return _region(isa, storage, value_storage, group, k_dim, v_dim, tiles, size, softcapped, offset, by_token)


@cache
def _region(
    isa: str, storage: str, value_storage: str, group: int, k_dim: int, v_dim: int, tiles: TileSizes, divisor: int,
    softcapped: bool, offset: bool, by_token: bool,
) -> Any:  # fmt: skip
    """Compile `region` for these tile sizes; Numba's disk cache keys it by the constants below, all plain values.

    divisor: the block size, by which a token's number is divided; 0 where lists are of blocks.
    """
    lanes, _, tile_queries, _, row_size, tile_tokens, columns = tiles
    num_tiles, step = tiles.number, 1
    if by_token:
        columns, step = columns_apart(isa, tile_queries, v_dim), _AT_ONCE
    k_units, v_units = STORAGE_TYPES[storage].units(k_dim), STORAGE_TYPES[value_storage].units(v_dim)
    # Each query tile prefetches an equal share of the next block's keys per token.
    share = -(-k_units // num_tiles)
    share_bytes = share * STORAGE_TYPES[storage].kernel_dtype.itemsize
    numbers, code_version = numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[value_storage]), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        (
            starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        ) = arguments_at("attend lists", numbers, arguments)  # fmt: skip
        kv_heads, block_size = q.shape[2], divisor if by_token else keys.shape[2]
        # A tile's scores: one row per token, and padding for whole vectors.
        at_once = _AT_ONCE if by_token else block_size
        tile_scores = (at_once * row_size + lanes - 1) // lanes * lanes + lanes
        lists = starts.size - 1
        total = starts[lists]
        factor = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        first, last = total * thread // threads, total * (thread + 1) // threads
        scaled_q, sums = scratch(group, k_dim), scratch(group, v_dim)
        scores, shifts = scratch(num_tiles, tile_scores), scratch(num_tiles, 2 * lanes)
        most, fresh, totals = np.empty((3, num_tiles, lanes), np.float32)
        places = np.empty(_AT_ONCE, np.int64)
        for index in range(lists):
            row, head = index // kv_heads, index % kv_heads
            if starts[index] == starts[index + 1] and thread == 0:
                for g in range(group):
                    lse[row, head, g] = -np.inf
                    for d in range(v_dim):
                        out[row, head, g, d] = 0
            if starts[index + 1] <= first or starts[index] >= last or starts[index] == starts[index + 1]:
                continue
            most[:], totals[:], sums[:] = -np.inf, 0, 0
            for g in range(group):
                for d in range(k_dim):
                    scaled_q[g, d] = q[row, 0, head, g, d] * factor
            which = min(head, block_ids.shape[1] - 1)
            entries = np.int64(block_counts[row, which])
            begin, position = np.int64(0), starts[index]
            if by_token:
                begin, entries = max(first - position, begin), min(last - position, entries)
            for entry in range(begin, entries, step):
                if by_token:
                    count: Any = min(_AT_ONCE, entries - entry)
                    for each in range(count):
                        if entry + each + _AHEAD < entries:
                            token = np.int64(block_ids[row, which, entry + each + _AHEAD])
                            place = (token // block_size * kv_heads + head) * block_size + token % block_size
                            prefetch(keys, place * k_units, k_units)
                        token = np.int64(block_ids[row, which, entry + each])
                        block = token // block_size * kv_heads + head
                        place = block * block_size + token % block_size
                        places[each] = place
                        prefetch(values, place * v_units, v_units)
                        score_rows(
                            lanes, storage, k_dim, group, tile_queries, 1, row_size, scaled_q, 0,
                            keys, place * k_units, scores, each * row_size, tile_scores,
                        )  # fmt: skip
                        if offset:
                            score_rows(
                                lanes, "float16", k_dim, group, tile_queries, 1, row_size, scaled_q, 0,
                                key_offsets, block * k_dim, shifts, 0, 2 * lanes,
                            )  # fmt: skip
                            for tile in range(num_tiles):
                                for lane in range(row_size):
                                    scores[tile, each * row_size + lane] += shifts[tile, lane]
                    vectors: Any = (count * row_size + lanes - 1) // lanes
                else:
                    count = np.int64(block_lengths[block_ids[row, which, entry]])
                    mine = first <= position and position < last
                    position += count
                    if not mine or count == 0:
                        continue
                    block = np.int64(block_ids[row, which, entry]) * kv_heads + head
                    for t in range(0, count, tile_tokens):
                        prefetch(values, (block * block_size + t) * v_units, tile_tokens * v_units)
                        score_rows(
                            lanes, storage, k_dim, group, tile_queries, tile_tokens, row_size, scaled_q, 0,
                            keys, (block * block_size + t) * k_units, scores, t * row_size, tile_scores,
                        )  # fmt: skip
                    vectors = (count * row_size + lanes - 1) // lanes
                    if offset:
                        score_rows(
                            lanes, "float16", k_dim, group, tile_queries, 1, row_size, scaled_q, 0,
                            key_offsets, block * k_dim, shifts, 0, 2 * lanes,
                        )  # fmt: skip
                        for tile in range(num_tiles):
                            for lane in range(row_size, lanes):
                                shifts[tile, lane] = shifts[tile, lane - row_size]
                            for vector in range(vectors):
                                for lane in range(lanes):
                                    scores[tile, vector * lanes + lane] += shifts[tile, lane]
                for tile in range(num_tiles):
                    scores[tile, count * row_size : vectors * lanes] = -np.inf
                    if softcapped:
                        row_softcap(scores, tile, count * row_size, np.float32(softcap) * LOG2_E)
                    at: Any = tile * lanes
                    if rows_most(lanes, row_size, scores, tile * tile_scores, lanes, vectors, most, at, fresh, at):
                        for g in range(tile * tile_queries, min(group, (tile + 1) * tile_queries)):
                            lane = g - tile * tile_queries
                            rescale = exp2(most[tile, lane] - fresh[tile, lane])
                            for d in range(v_dim):
                                sums[g, d] *= rescale
                        for lane in range(lanes):
                            totals[tile, lane] *= exp2(most[tile, lane] - fresh[tile, lane])
                            most[tile, lane] = fresh[tile, lane]
                    rows_exp2(lanes, scores, tile * tile_scores, lanes, vectors, most, at, totals, at)
                if by_token:
                    accumulate_rows_at(
                        lanes, value_storage, v_dim, group, tile_queries, row_size, columns, scores, tile_scores,
                        values, places, None, count, sums,
                    )  # fmt: skip
                else:
                    following = np.int64(block_ids[row, which, min(entry + 1, entries - 1)]) * kv_heads + head
                    for t in range(0, count, _VALUE_TILE):
                        tokens: Any = min(_VALUE_TILE, count - t)
                        accumulate_rows(
                            lanes, value_storage, v_dim, group, tile_queries, row_size, columns,
                            scores, t * row_size, tile_scores, 1, values, (block * block_size + t) * v_units, tokens,
                            sums, keys, following * (block_size * k_units) + t * num_tiles * share, tokens * share,
                            share_bytes,
                        )  # fmt: skip
            edge = 2 * thread + (0 if starts[index] < first else 1)
            whole = starts[index] >= first and starts[index + 1] <= last
            keep_part(
                index, edge, whole, tile_queries, row_size, most, totals, sums, edges, edge_sums, edge_most, edge_total,
                out, lse,
            )  # fmt: skip
        return np.int64(0 * code_version)

    return attend
