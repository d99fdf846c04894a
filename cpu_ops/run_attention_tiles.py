"""`run_attention.attend_runs` in bfloat16 by AMX's tiles, where a CPU has them.

As there, a block's queries are in the lanes. Keys and words of queries are multiplied as they lie; of values the words
are turned, so that their sums have the queries in the lanes too, and nothing of the softmax is.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from cpu_ops.amx_tiles import BLOCK, TILE, begin_tiles, end_tiles, multiply_by_tiles, turn_words
from cpu_ops.bfloat16_tiles import lane_weights_bf16
from cpu_ops.code_version import CODE_VERSION
from cpu_ops.exponential import LN_2, LOG2_E, exp2, row_softcap
from cpu_ops.gathered_rows import copy_row, pair_rows, row_address
from cpu_ops.key_runs import QUERY_BLOCK
from cpu_ops.listed_keys import UNSEEN, address_in, hide, next_listed, outgrown, places_of
from cpu_ops.number_bits import round_row
from cpu_ops.parallel_region import REGION, arguments_at
from cpu_ops.scratch import scratch
from cpu_ops.softmax_rows import rows_most

_TOKENS = 128
"""Tokens that are gathered at once, a multiple of `BLOCK`: their keys, values and scores stay close in the caches."""


@cache
def tiles_region(k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape; on disk Numba keys it by the constants below, all plain values."""
    words, depth = k_dim // 2, -(-k_dim // BLOCK) * TILE
    v_pad = -(-v_dim // BLOCK) * BLOCK
    columns, tokens, lanes, side = QUERY_BLOCK, _TOKENS, TILE, BLOCK
    pairs = tokens // 2
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        q, past_k, past_v, k, v, runs, starts, scale, softcap, out, lse = arguments_at(
            "attend runs", "bfloat16", arguments
        )
        heads, n, kv_heads, past = q.shape[1], q.shape[2], k.shape[1], past_k.shape[2]
        blocks = -(-n // columns)
        factor = np.float32(1) if softcapped else np.float32(scale * LOG2_E)
        before_cap = np.float32(scale / softcap) if softcapped else np.float32(0)
        turned_q, key_words = scratch(depth, columns).view(np.uint32), scratch(tokens, depth).view(np.uint32)
        value_words, turned_values = scratch(pairs, v_pad).view(np.uint32), scratch(v_pad, pairs).view(np.uint32)
        # A row for each of the values' channels, and in the end for each query.
        sums, turned_sums = scratch(v_pad, columns), scratch(columns, v_pad)
        sum_words, turned_sum_words = sums.view(np.uint32), turned_sums.view(np.uint32)
        query_words = scratch(columns, depth).view(np.uint32)
        scores, weights = scratch(tokens, columns), scratch(pairs, columns).view(np.uint32)
        listed = np.empty(tokens, np.int64)
        most, totals, fresh, rescale = np.empty((4, columns), np.float32)
        found = np.empty(64, np.uint8)
        begin_tiles(found)
        for item in range(thread, starts.size - 1, threads):
            block, head, row = item % blocks, item // blocks % heads, item // blocks // heads
            kv_head, first = head // (heads // kv_heads), block * columns
            count = min(columns, n - first)
            query_words[:] = 0
            for i in range(count):
                copy_row(words, row_address(q, row, head, first + i), query_words, i * depth)
            for d in range(0, depth, lanes):
                for i in range(0, columns, lanes):
                    turn_words(query_words, i * depth + d, depth, turned_q, d * columns + i, columns)
            key_places, value_places = places_of(past_k, k, row, kv_head), places_of(past_v, v, row, kv_head)
            most[:], totals[:], sums[:] = UNSEEN, 0, 0
            run, token = starts[item], np.int64(0)
            while run < starts[item + 1]:
                run, token, filled = next_listed(runs, run, token, starts[item + 1], listed)
                # As many as products that are made at once have rows.
                whole = -(-filled // side) * side
                for t in range(filled):
                    copy_row(words, address_in(key_places, past, listed[t]), key_words, t * depth)
                for t in range(0, filled - 1, 2):
                    even = address_in(value_places, past, listed[t])
                    odd = address_in(value_places, past, listed[t + 1])
                    pair_rows(v_dim, even, odd, value_words, (t // 2) * v_pad)
                if filled % 2:
                    last = address_in(value_places, past, listed[filled - 1])
                    pair_rows(v_dim, last, last, value_words, (filled // 2) * v_pad)
                for pair in range(0, whole // 2, lanes):
                    for d in range(0, v_dim, lanes):
                        turn_words(value_words, pair * v_pad + d, v_pad, turned_values, d * pairs + pair, pairs)
                for t in range(0, whole, side):
                    for i in range(0, columns, side):
                        at = t * columns + i
                        multiply_by_tiles(
                            0, key_words, t * depth, depth, depth, turned_q, i, columns, scores, at, columns
                        )
                if softcapped:
                    for t in range(filled):
                        for i in range(columns):
                            scores[t, i] *= before_cap
                        row_softcap(scores, t, columns, np.float32(softcap) * LOG2_E)
                if listed[filled - 1] > past + first:
                    hide(listed, filled, past + first, scores)
                # Behind the list: no query sees it.
                scores[filled:whole] = UNSEEN
                grown = False
                for i in range(0, columns, lanes):
                    grown |= rows_most(lanes, lanes, scores, i, columns, filled, most, i, fresh, i)
                if grown and outgrown(most, 0, fresh, factor):
                    for i in range(columns):
                        rescale[i] = exp2((most[i] - fresh[i]) * factor)
                        most[i] = fresh[i]
                        totals[i] *= rescale[i]
                    for d in range(v_dim):
                        for i in range(columns):
                            sums[d, i] *= rescale[i]
                for i in range(0, columns, lanes):
                    lane_weights_bf16(columns, scores, i, whole // 2, factor, most, i, weights, totals)
                for d in range(0, v_pad, side):
                    for i in range(0, columns, side):
                        at = d * columns + i
                        multiply_by_tiles(
                            1, turned_values, d * pairs, pairs, whole // 2, weights, i, columns, sums, at, columns
                        )
            for i in range(columns):
                rescale[i] = np.float32(1) / totals[i]
            for d in range(v_dim):
                for i in range(columns):
                    sums[d, i] *= rescale[i]
            for d in range(0, v_dim, lanes):
                for i in range(0, columns, lanes):
                    turn_words(sum_words, d * columns + i, columns, turned_sum_words, i * v_pad + d, v_pad)
            for i in range(count):
                round_row(turned_sums[i, :v_dim], out[row, first + i, head])
                lse[row, head, first + i] = (most[i] * factor + np.log2(totals[i])) * LN_2
        end_tiles(found)
        return np.int64(0 * code_version)

    return attend
