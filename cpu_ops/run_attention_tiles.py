"""`run_attention.attend_runs` in bfloat16 with AMX tiles, on CPUs that have them.

As there, a block's queries are in the lanes. Keys of `BLOCK` consecutive tokens are multiplied in place; other tokens
are gathered first. Values are transposed once for all queries, so that output sums also have the queries in the lanes,
and the softmax needs no sums across lanes.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.amx_tiles import BLOCK, TILE, begin_tiles, end_tiles, multiply_from, transpose_words
from hetero_kv.cpu_ops.bfloat16_bits import round_row
from hetero_kv.cpu_ops.bfloat16_tiles import lane_weights_bf16
from hetero_kv.cpu_ops.cache_lines import on_lines
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E
from hetero_kv.cpu_ops.gathered_rows import copy_row, pair_rows, row_address
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.listed_keys import MASKED, address_in, mask_future, places_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.softmax_rows import rows_most
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.tile_softmax import cap_products, divide_sums, rescale_outgrown

_LISTED = 4
"""Lists of `BLOCK` tokens that are multiplied at once: their scores stay in the caches."""
_LINE = 4 * TILE
"""Bytes of a row of transposed values."""
_TRANSPOSED_BYTES = 1 << 26
"""Bytes of the buffer of transposed values; the values of one kv head may exceed it."""
_TRANSPOSED_FROM = 4
"""If more blocks of queries than this attend to a token on average, all values are transposed once in advance."""


def attend_by_tiles(
    arrays: Sequence[np.ndarray], runs: np.ndarray, starts: np.ndarray, scale: float, softcap: float,
    threads: int | None, out: np.ndarray, lse: np.ndarray,
) -> None:  # fmt: skip
    """Compute out and lse of `run_attention.attend_runs`, which checks the arguments.

    arrays: q, past_k, past_v, k and v; q and keys as words. If it pays, values are transposed in advance, for as many
    kv heads at a time as fit into `_TRANSPOSED_BYTES`.
    """
    _, past_k, _, k, v = arrays
    (rows, kv_heads, n, words), past, v_dim = k.shape, past_k.shape[2], v.shape[3]
    region = address_of(tiles_region(2 * words, v_dim, softcap > 0))
    named = int((runs[:, 1] - runs[:, 0]).sum(dtype=np.int64))
    pays = named > _TRANSPOSED_FROM * rows * kv_heads * (past + n)
    blocks = (past + n) // BLOCK if pays and words % TILE == 0 else 0
    shape = blocks, -(-v_dim // BLOCK) * BLOCK, TILE
    together = min(rows * kv_heads, max(1, _TRANSPOSED_BYTES // max(1, 4 * math.prod(shape))))
    transposed = on_lines((together, *shape), np.uint32)
    with kernel_threads(threads) as used:
        for first in range(0, rows * kv_heads, together):
            heads = first, min(first + together, rows * kv_heads)
            for turns in (True, False) if blocks else (False,):
                run_args = runs, starts, float(scale), float(softcap), *heads
                call_region("attend runs by tiles", "", region, (*arrays, *run_args, transposed, turns, out, lse), used)


@region_arguments("attend runs by tiles")
def _arguments(_: str) -> tuple[Any, ...]:
    """(q, past_k, past_v, k, v, runs, starts, scale, softcap, first, stop, transposed, turns, out, lse).

    first, stop: the range of kv heads, counted over all rows, whose queries attend. transposed: their transposed
    values, [heads, whole blocks of `BLOCK` tokens, v_dim rounded up, `TILE`]; without blocks, nothing is transposed in
    advance. turns: True to write a thread's share of `transposed`, False to attend.
    """
    keys, values = types.Array(types.uint32, 4, "A"), types.Array(types.uint16, 4, "A")
    runs, starts = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")
    out, lse = types.Array(types.uint16, 4, "C"), types.Array(types.float32, 3, "C")
    real, at, transposed = types.float64, types.int64, types.Array(types.uint32, 4, "C")
    return keys, keys, values, keys, values, runs, starts, real, real, at, at, transposed, types.boolean, out, lse


@device_function
def _split(runs, first, stop, past, is_whole, whole, apart):
    """Split the tokens of the runs from `first` to `stop` into whole blocks of `BLOCK` tokens and single tokens.

    A whole block begins at a multiple of its size and is entirely in past or in the chunk; is_whole: whether to look
    for whole blocks. Writes the first token of each block to `whole` and single tokens to `apart`; returns their
    numbers.
    """
    wholes, aparts = 0, 0
    for run in range(first, stop):
        token, end = np.int64(runs[run, 0]), np.int64(runs[run, 1])
        while token < end:
            block = min(end, (token // BLOCK + 1) * BLOCK)
            if is_whole and block - token == BLOCK and (block <= past or past <= token):
                whole[wholes] = token
                wholes += 1
            else:
                for each in range(token, block):
                    apart[aparts] = each
                    aparts += 1
            token = block
    return wholes, aparts


@cache
def tiles_region(k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    words, depth = k_dim // 2, -(-k_dim // BLOCK) * TILE
    v_pad = -(-v_dim // BLOCK) * BLOCK
    columns, lanes, side, most_lists = QUERY_BLOCK, TILE, BLOCK, _LISTED
    deep, tokens, line, list_line = depth // TILE, _LISTED * BLOCK, _LINE, v_pad * _LINE
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        q, past_k, past_v, k, v, runs, starts, scale, softcap, first_head, stop_head, transposed, turns, out, lse = (
            arguments_at("attend runs by tiles", "", arguments)
        )
        heads, n, kv_heads, past = q.shape[1], q.shape[2], k.shape[1], past_k.shape[2]
        value_words, whole_blocks = scratch(lanes, v_pad).view(np.uint32), transposed.shape[1]
        if turns:
            for number in range(thread, (stop_head - first_head) * whole_blocks, threads):
                index, block = first_head + number // whole_blocks, number % whole_blocks
                value_places = places_of(past_v, v, index // kv_heads, index % kv_heads)
                for pair in range(lanes):
                    even = address_in(value_places, past, block * side + 2 * pair)
                    odd = address_in(value_places, past, block * side + 2 * pair + 1)
                    pair_rows(v_dim, even, odd, value_words, pair * v_pad)
                for d in range(0, v_dim, lanes):
                    transpose_words(value_words, d, v_pad, transposed, (number * v_pad + d) * lanes, lanes)
            return np.int64(0 * code_version)
        blocks, group = -(-n // columns), heads // kv_heads
        factor = np.float32(1) if softcapped else np.float32(scale * LOG2_E)
        before_cap = np.float32(scale / softcap) if softcapped else np.float32(0)
        transposed_q = scratch(depth, columns).view(np.uint32)
        # Buffers of single tokens.
        copied_keys = scratch(tokens, depth).view(np.uint32)
        copied_values = scratch(most_lists * v_pad, lanes).view(np.uint32)
        # `sums` has one row per channel of the values; `transposed_sums` has one row per query.
        sums, transposed_sums = scratch(v_pad, columns), scratch(columns, v_pad)
        query_words = scratch(columns, depth).view(np.uint32)
        scores, weights = scratch(tokens, columns), scratch(tokens // 2, columns).view(np.uint32)
        whole, apart = np.empty((past + n) // side, np.int64), np.empty(past + n, np.int64)
        # Addresses of each list's keys, for every `lanes` words, with the keys' row strides; addresses of its values.
        keys_at, pitches = np.empty(most_lists * deep, np.int64), np.empty(most_lists, np.int64)
        values_at, listed = np.empty(most_lists, np.int64), np.empty(tokens, np.int64)
        keys_here, values_here = np.int64(copied_keys.ctypes.data), np.int64(copied_values.ctypes.data)
        transposed_at = np.int64(transposed.ctypes.data)
        most, totals, fresh, rescale = np.empty((4, columns), np.float32)
        found = np.empty(64, np.uint8)
        begin_tiles(found)
        # Query heads of a kv head are consecutive, and so are the kv heads of a row.
        for item in range(first_head * group * blocks + thread, stop_head * group * blocks, threads):
            block, head, row = item % blocks, item // blocks % heads, item // blocks // heads
            kv_head, first = head // group, block * columns
            count = min(columns, n - first)
            query_words[:] = 0
            for i in range(count):
                copy_row(words, row_address(q, row, head, first + i), query_words, i * depth)
            for d in range(0, depth, lanes):
                for i in range(0, columns, lanes):
                    transpose_words(query_words, i * depth + d, depth, transposed_q, d * columns + i, columns)
            key_places, value_places = places_of(past_k, k, row, kv_head), places_of(past_v, v, row, kv_head)
            own_transposed = transposed_at + (row * kv_heads + kv_head - first_head) * whole_blocks * list_line
            most[:], totals[:], sums[:] = MASKED, 0, 0
            wholes, aparts = _split(runs, starts[item], starts[item + 1], past, whole_blocks > 0, whole, apart)
            lists = wholes + -(-aparts // side)
            for first_list in range(0, lists, most_lists):
                here, farthest = min(most_lists, lists - first_list), np.int64(0)
                for index in range(here):
                    number, at = first_list + index, index * side
                    if number < wholes:
                        token = whole[number]
                        for t in range(side):
                            listed[at + t] = token + t
                        key_at, pitch = address_in(key_places, past, token), key_places[1 if token < past else 3]
                        values_at[index] = own_transposed + token // side * list_line
                    else:
                        for t in range(side):
                            listed[at + t] = apart[min((number - wholes) * side + t, aparts - 1)]
                            copy_row(words, address_in(key_places, past, listed[at + t]), copied_keys, (at + t) * depth)
                        for pair in range(lanes):
                            even = address_in(value_places, past, listed[at + 2 * pair])
                            odd = address_in(value_places, past, listed[at + 2 * pair + 1])
                            pair_rows(v_dim, even, odd, value_words, pair * v_pad)
                        for d in range(0, v_dim, lanes):
                            transpose_words(value_words, d, v_pad, copied_values, (index * v_pad + d) * lanes, lanes)
                        key_at, pitch = keys_here + at * 4 * depth, np.int64(4 * depth)
                        values_at[index] = values_here + index * list_line
                    for word in range(deep):
                        keys_at[index * deep + word] = key_at + word * line
                    pitches[index] = pitch
                    farthest = max(farthest, listed[at + side - 1])
                for index in range(here):
                    for i in range(0, columns, side):
                        multiply_from(
                            0, keys_at, index * deep, deep, 0, pitches[index], transposed_q, i, columns,
                            scores, index * side * columns + i, columns,
                        )  # fmt: skip
                filled = here * side
                if softcapped:
                    cap_products(scores, filled, before_cap, softcap)
                if farthest > past + first:
                    mask_future(listed, filled, past + first, scores)
                if first_list + here == lists:
                    # The last list repeats its last token as padding, which is masked.
                    scores[filled - (lists - wholes) * side + aparts : filled] = MASKED
                grown = False
                for i in range(0, columns, lanes):
                    grown |= rows_most(lanes, lanes, scores, i, columns, filled, most, i, fresh, i)
                if grown:
                    rescale_outgrown(most, 0, fresh, factor, totals, rescale, sums, 0, v_dim)
                for i in range(0, columns, lanes):
                    lane_weights_bf16(columns, scores, i, filled // 2, factor, most, i, weights, totals)
                for d in range(0, v_pad, side):
                    for i in range(0, columns, side):
                        multiply_from(
                            1, values_at, 0, here, d * line, line, weights, i, columns, sums, d * columns + i, columns
                        )
            divide_sums(totals, 0, rescale, sums, 0, v_dim, transposed_sums)
            for i in range(count):
                round_row(transposed_sums[i, :v_dim], out[row, first + i, head])
                lse[row, head, first + i] = (most[i] * factor + np.log2(totals[i])) * LN_2
        end_tiles(found)
        return np.int64(0 * code_version)

    return attend
