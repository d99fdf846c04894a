"""Attention to single tokens anywhere in the blocks of a pool, with one list of tokens per row and kv head.

As in `attention` for whole blocks, threads divide the tokens, and partial results of a shared list are merged by their
log-sum-exps. Unlike `token_lists`, one call computes scores, softmax and output.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.exponential import LOG2_E, exp2, row_softcap
from cpu_ops.kernel_address import address_of, called_as
from cpu_ops.list_attention import OFFSETS
from cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from cpu_ops.scratch import scratch
from cpu_ops.simd import accumulate_rows_at, prefetch, score_rows
from cpu_ops.softmax_rows import rows_exp2, rows_most
from cpu_ops.storage import STORAGE_TYPES, numbers_of, pool_arrays, storage_of
from cpu_ops.tiles import columns_apart, tiles_for
from cpu_ops.work_division import keep_part, merge_edges

_AT_ONCE = 64
"""Tokens that are scored before their values are added."""
_AHEAD = 8
"""How many tokens ahead the kernel prefetches, because hardware cannot predict their addresses."""
_INT3 = types.Array(types.int32, 3, "C")
_REAL4, _REAL3, _REAL2 = (types.Array(types.float32, dims, "C") for dims in (4, 3, 2))


def _input_types(numbers: str) -> tuple[Any, ...]:
    """The types of (q, keys, values, key_offsets, tokens, counts, scale, softcap)."""
    return _REAL4, *pool_arrays(numbers), OFFSETS, _INT3, _INT3, types.float64, types.float64


@region_arguments("attend tokens")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments: (q, keys, values, key_offsets, tokens, counts, scale, softcap, edges, edge_sums,
    edge_most, edge_total, out, lse), as in `signature`, with edges as in `list_attention.arguments`."""
    edges = types.Array(types.int64, 1, "C"), _REAL3, _REAL2, _REAL2
    return (*_input_types(numbers), *edges, _REAL4, _REAL3)


@called_as("attend tokens")
def signature(numbers: str) -> Any:
    """The kernels' signature: (run, region, q, keys, values, key_offsets, tokens, counts, scale, softcap, threads, out,
    lse).

    run: `parallel_region.all_threads()`. region: its address. q: [rows, kv_heads, group, k_dim] float32. keys, values,
    key_offsets: as in `attention.attend_blocks`, viewed as `numbers`. tokens: [rows, 1 or kv_heads, n] int32, indices
    in the pool, block id * block_size + offset. counts: [rows, lists, 1 or more] int32; counts[..., 0] are the entries
    in use. scale, softcap: as there. out: [rows, kv_heads, group, v_dim] and lse [rows, kv_heads, group] float32,
    written; 0 and -inf for an empty list.
    """
    integer = types.int64
    return integer(integer, integer, *_input_types(numbers), integer, _REAL4, _REAL3)


@cache
def kernel_for(numbers: str) -> Any:
    """Compile the kernel for pools viewed as `numbers` (as in `signature`), or load it from Numba's on-disk cache."""
    code_version = CODE_VERSION

    @njit(signature(numbers), cache=True, nogil=True, error_model="numpy")
    def attend_tokens(
        run, region, q, keys, values, key_offsets, tokens, counts, scale, softcap, threads, out, lse
    ):  # fmt: skip
        group, v_dim = out.shape[2:]
        edges = np.full(2 * threads, -1, np.int64)
        edge_sums = np.empty((2 * threads, group, v_dim), np.float32)
        edge_most, edge_total = np.empty((2 * threads, group), np.float32), np.empty((2 * threads, group), np.float32)
        region_args = (
            q, keys, values, key_offsets, tokens, counts, scale, softcap, edges, edge_sums, edge_most, edge_total, out,
            lse,
        )  # fmt: skip
        run_region("attend tokens", numbers, run, region, threads, region_args)
        merge_edges(edges, edge_sums, edge_most, edge_total, out, lse)
        return np.int64(0 * code_version)

    return attend_tokens


def region_for(
    q: tuple[int, ...], keys: tuple[int, ...], v_dim: int, dtype: np.dtype, value_dtype: np.dtype, softcapped: bool,
    offset: bool,
) -> int:  # fmt: skip
    """Returns the address of the region "attend tokens" for q [rows, kv_heads, group, k_dim] and these pool types."""
    names = storage_of(dtype).name, storage_of(value_dtype).name
    return address_of(_region(isa(), *names, q[2], q[3], v_dim, keys[2], softcapped, offset))


@cache
def _region(
    isa: str, storage: str, value_storage: str, group: int, k_dim: int, v_dim: int, block_size: int, softcapped: bool,
    offset: bool,
) -> Any:  # fmt: skip
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    tiles = tiles_for(isa, group, 1)
    lanes, tile_queries, row_size, num_tiles = tiles.lanes, tiles.queries, tiles.row, tiles.number
    columns = columns_apart(isa, tile_queries, v_dim)
    tile_scores = _AT_ONCE * row_size + lanes
    k_units, v_units = STORAGE_TYPES[storage].units(k_dim), STORAGE_TYPES[value_storage].units(v_dim)
    numbers, code_version = numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[value_storage]), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        (
            q, keys, values, key_offsets, tokens, counts, scale, softcap, edges, edge_sums, edge_most, edge_total, out,
            lse,
        ) = arguments_at("attend tokens", numbers, arguments)  # fmt: skip
        rows, kv_heads = q.shape[:2]
        lists, total = tokens.shape[1], np.int64(0)
        for index in range(rows * kv_heads):
            total += counts[index // kv_heads, min(index % kv_heads, lists - 1), 0]
        first, last = total * thread // threads, total * (thread + 1) // threads
        factor = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        scaled_q, sums = scratch(group, k_dim), scratch(group, v_dim)
        scores, shifts = scratch(num_tiles, tile_scores), scratch(num_tiles, 2 * lanes)
        most, fresh, totals = np.empty((3, num_tiles, lanes), np.float32)
        places, before = np.empty(_AT_ONCE, np.int64), np.int64(0)
        for index in range(rows * kv_heads):
            row, head = index // kv_heads, index % kv_heads
            own = tokens[row, min(head, lists - 1)]
            count = np.int64(counts[row, min(head, lists - 1), 0])
            if count == 0 and thread == 0:
                lse[row, head] = -np.inf
                out[row, head] = 0
            start, stop = max(first - before, 0), min(last - before, count)
            begun, before = before, before + count
            if start >= stop:
                continue
            most[:], totals[:], sums[:] = -np.inf, 0, 0
            for g in range(group):
                for d in range(k_dim):
                    scaled_q[g, d] = q[row, head, g, d] * factor
            for begin in range(start, stop, _AT_ONCE):
                here: Any = min(_AT_ONCE, stop - begin)
                for each in range(here):
                    if begin + each + _AHEAD < stop:
                        token = np.int64(own[begin + each + _AHEAD])
                        place = (token // block_size * kv_heads + head) * block_size + token % block_size
                        prefetch(keys, place * k_units, k_units)
                    token = np.int64(own[begin + each])
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
                vectors: Any = (here * row_size + lanes - 1) // lanes
                for tile in range(num_tiles):
                    scores[tile, here * row_size : vectors * lanes] = -np.inf
                    if softcapped:
                        row_softcap(scores, tile, here * row_size, np.float32(softcap) * LOG2_E)
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
                accumulate_rows_at(
                    lanes, value_storage, v_dim, group, tile_queries, row_size, columns, scores, tile_scores,
                    values, places, here, sums,
                )  # fmt: skip
            is_whole = start == 0 and stop == count
            edge = 2 * thread + (0 if begun < first else 1)
            keep_part(
                index, edge, is_whole, tile_queries, row_size, most, totals, sums, edges, edge_sums, edge_most,
                edge_total, out, lse,
            )  # fmt: skip
        return np.int64(0 * code_version)

    return attend
