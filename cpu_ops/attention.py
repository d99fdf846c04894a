"""Attention of one query position to blocks of keys and values, read in place in DRAM.

Each block is read once, with the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1).
`list_attention` divides the work among threads.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import get_num_threads, njit, set_num_threads

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.exponential import LOG2_E, exp2, row_softcap
from cpu_ops.kernel_address import address_of
from cpu_ops.list_attention import kernel_for as list_kernel_for
from cpu_ops.list_checks import check_lists, check_offsets, outside_pool, wrong_array
from cpu_ops.parallel_region import REGION, all_threads, arguments_at
from cpu_ops.scratch import scratch
from cpu_ops.simd import accumulate_rows, prefetch, score_rows
from cpu_ops.softmax_rows import rows_exp2, rows_most
from cpu_ops.storage import STORAGE_TYPES, numbers_of
from cpu_ops.threads import one_kernel_at_a_time, use_threads
from cpu_ops.tiles import tiles_for
from cpu_ops.work_division import keep_part

NO_OFFSETS = np.empty((0, 0, 0), np.uint16)
_VALUE_TILE = 32
"""Tokens whose values are accumulated before the partial outputs are stored to memory."""


def attend_blocks(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_ids: np.ndarray,
    block_counts: np.ndarray,
    block_lengths: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    out: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    threads: int | None = None,
    key_offsets: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of one query position per sequence to the blocks in its lists.

    q: [rows, kv_heads, group, k_dim] float32, grouped by kv head.
    keys: [num_blocks, kv_heads, block_size, k_dim], values: [num_blocks, kv_heads, block_size, v_dim], each of a
    storage type (`cpu_ops.storage`; the last dimension counts records for grouped types). Only listed blocks are read.
    block_ids: [rows, 1 or kv_heads, max_blocks] int32, one list for all kv heads or one for each.
    block_counts: [rows, 1 or kv_heads] int32, entries in use. block_lengths: [num_blocks] int32, tokens in each block.
    scale multiplies the scores; softcap c > 0 then turns them into c * tanh(score / c).
    threads: number of threads (None: Numba's setting). key_offsets: [num_blocks, kv_heads, k_dim] uint16, bits of the
    float16 vector that was subtracted from the keys of each block before storing; None if nothing was subtracted.

    Returns out [rows, kv_heads, group, v_dim] float32 and lse [rows, kv_heads, group] float32, the natural logarithm of
    the sum of exp(score); 0 and -inf for an empty list. `out` and `lse` are written in place if passed.

    Raises ValueError or TypeError for arrays that do not fit together, IndexError for ids, counts or lengths that
    point outside the pool.
    """
    kernel, region, k_dtype, v_dtype, rows, kv_heads, group, v_dim = _plan(
        q.shape, keys.shape, values.shape, block_ids.shape, block_counts.shape, block_lengths.shape,
        keys.dtype, values.dtype, softcap > 0, isa(), None if key_offsets is None else key_offsets.shape,
    )  # fmt: skip
    if out is None:
        out = np.empty((rows, kv_heads, group, v_dim), np.float32)
    if lse is None:
        lse = np.empty((rows, kv_heads, group), np.float32)
    if out.shape != (rows, kv_heads, group, v_dim) or lse.shape != (rows, kv_heads, group):
        raise ValueError(f"out {out.shape} and lse {lse.shape} should be {(rows, kv_heads, group)} + ({v_dim},) and ()")
    lists = NO_OFFSETS if key_offsets is None else key_offsets, block_ids, block_counts, block_lengths
    # The same as `kernel_threads`, inlined: this runs for every layer of every token.
    with one_kernel_at_a_time:
        before = get_num_threads()
        used = before if threads is None or threads == before else use_threads(threads)
        try:
            status = kernel(
                all_threads(), region, 0, q[:, None], keys.view(k_dtype), values.view(v_dtype), *lists,
                scale, softcap, used, out, lse,
            )  # fmt: skip
        except TypeError as error:
            raise TypeError(wrong_array(q, keys, values, block_ids, block_counts, block_lengths, out, lse)) from error
        finally:
            if used != before:
                set_num_threads(before)
    if status < 0:
        raise IndexError(outside_pool(status, keys, block_ids, block_counts, block_lengths))
    return out, lse


def compile_for(
    group: int, k_dim: int, v_dim: int, block_size: int, storage: str = "float16", softcap: bool = False,
    value_storage: str | None = None, offset: bool = False,
) -> None:  # fmt: skip
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first token needs it.

    storage: of keys, and of values if `value_storage` is None. offset: whether `key_offsets` are used. Raises
    ValueError for a type that is not registered.
    """
    value_storage = value_storage or storage
    for each in (storage, value_storage):
        if each not in STORAGE_TYPES:
            raise ValueError(f"storage {each!r} is not one of {', '.join(STORAGE_TYPES)}")
    list_kernel_for(numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[value_storage]))
    _region(isa(), storage, value_storage, group, k_dim, v_dim, block_size, softcap, offset)


class _Plan(NamedTuple):
    kernel: Any
    region: int
    k_dtype: np.dtype
    v_dtype: np.dtype
    rows: int
    kv_heads: int
    group: int
    v_dim: int


@lru_cache(maxsize=4096)
def _plan(
    q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    lengths: tuple[int, ...], dtype: np.dtype, value_dtype: np.dtype, softcapped: bool, instructions: str,
    offsets: tuple[int, ...] | None,
) -> "_Plan":  # fmt: skip
    """Check that shapes fit together and find their kernel; cached, because every layer of every token needs it."""
    k_storage, v_storage, v_dim = check_lists(q, keys, values, ids, counts, lengths, dtype, value_dtype)
    rows, kv_heads, group, k_dim = q
    check_offsets(offsets, keys, k_dim)
    shape = group, k_dim, v_dim, keys[2]
    region = address_of(_region(instructions, k_storage.name, v_storage.name, *shape, softcapped, offsets is not None))
    kernel = list_kernel_for(numbers_of(k_storage, v_storage))
    return _Plan(kernel, region, k_storage.kernel_dtype, v_storage.kernel_dtype, rows, kv_heads, group, v_dim)


def region_for(
    q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    lengths: tuple[int, ...], dtype: np.dtype, value_dtype: np.dtype, softcapped: bool,
    offsets: tuple[int, ...] | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Returns the address of the region "attend lists" for arrays of these shapes (as in `attend_blocks`), and v_dim.

    Raises the errors of `check_lists`.
    """
    plan = _plan(q, keys, values, ids, counts, lengths, dtype, value_dtype, softcapped, isa(), offsets)
    return plan.region, plan.v_dim


@cache
def _region(
    isa: str, storage: str, value_storage: str, group: int, k_dim: int, v_dim: int, block_size: int, softcapped: bool,
    offset: bool,
) -> Any:  # fmt: skip
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    tiles = tiles_for(isa, group, block_size)
    lanes, _, tile_queries, _, row_size, tile_tokens, columns = tiles
    num_tiles = tiles.number
    # A tile's scores: one row per token of the block, and padding for whole vectors.
    tile_scores = -(-(block_size * row_size) // lanes) * lanes + lanes
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
        kv_heads = q.shape[2]
        lists = starts.size - 1
        total = starts[lists]
        factor = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        first, last = total * thread // threads, total * (thread + 1) // threads
        scaled_q, sums = scratch(group, k_dim), scratch(group, v_dim)
        scores, shifts = scratch(num_tiles, tile_scores), scratch(num_tiles, 2 * lanes)
        most, fresh, totals = np.empty((3, num_tiles, lanes), np.float32)
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
            entries = block_counts[row, which]
            position = starts[index]
            for entry in range(entries):
                block = np.int64(block_ids[row, which, entry])
                count = np.int64(block_lengths[block])
                mine = first <= position and position < last
                position += count
                if not mine or count == 0:
                    continue
                k_at = (block * kv_heads + head) * (block_size * k_units)
                v_at = (block * kv_heads + head) * (block_size * v_units)
                following = np.int64(block_ids[row, which, min(entry + 1, entries - 1)])
                next_k_at = (following * kv_heads + head) * (block_size * k_units)
                for t in range(0, count, tile_tokens):
                    prefetch(values, v_at + t * v_units, tile_tokens * v_units)
                    score_rows(
                        lanes, storage, k_dim, group, tile_queries, tile_tokens, row_size, scaled_q, 0,
                        keys, k_at + t * k_units, scores, t * row_size, tile_scores,
                    )  # fmt: skip
                vectors: Any = (count * row_size + lanes - 1) // lanes
                if offset:
                    score_rows(
                        lanes, "float16", k_dim, group, tile_queries, 1, row_size, scaled_q, 0,
                        key_offsets, (block * kv_heads + head) * k_dim, shifts, 0, 2 * lanes,
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
                for t in range(0, count, _VALUE_TILE):
                    tokens: Any = min(_VALUE_TILE, count - t)
                    accumulate_rows(
                        lanes, value_storage, v_dim, group, tile_queries, row_size, columns,
                        scores, t * row_size, tile_scores, values, v_at + t * v_units, tokens, sums,
                        keys, next_k_at + t * num_tiles * share, tokens * share, share_bytes,
                    )  # fmt: skip
            edge = 2 * thread + (0 if starts[index] < first else 1)
            whole = starts[index] >= first and starts[index + 1] <= last
            keep_part(
                index, edge, whole, tile_queries, row_size, most, totals, sums, edges, edge_sums, edge_most, edge_total,
                out, lse,
            )  # fmt: skip
        return np.int64(0 * code_version)

    return attend
