"""`prompt_attention.attend_prompt` with AMX tiles, on CPUs that have them.

As there, all query heads of a kv head are processed together, and keys and values of a few tokens at a time are
multiplied with all queries of a work item. As in `run_attention_tiles`, queries are in the lanes, so that nothing is
summed across lanes.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.amx_tiles import BLOCK, TILE, begin_tiles, end_tiles, multiply_by_tiles, transpose_words
from hetero_kv.cpu_ops.bfloat16_bits import round_row
from hetero_kv.cpu_ops.bfloat16_tiles import lane_weights_bf16
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E
from hetero_kv.cpu_ops.gathered_rows import copy_row, pair_rows, row_address
from hetero_kv.cpu_ops.listed_keys import LEAST, MASKED, address_in, places_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.softmax_rows import rows_most
from hetero_kv.cpu_ops.tile_softmax import cap_products, divide_sums, rescale_outgrown

_ITEM_COLUMNS = 24 * BLOCK
"""Queries of a work item: their sums fit into the L2 cache."""
_KEYS = 96
"""Tokens that are laid out at once, a multiple of `BLOCK`."""


@device_function(error_model="numpy")
def _mask_unseen(scores, place, group, first, window):
    """Mask the scores [tokens, columns] that queries do not see; a column's query index is `place` + column.

    place: token * group + head in group, with tokens of the chunk. first: the scores' first token, relative to the
    chunk. window: tokens that a query sees, including its own.
    """
    for column in range(scores.shape[1]):
        last = (place + column) // group - first
        for t in range(max(0, min(last + 1 - window, scores.shape[0]))):
            scores[t, column] = MASKED
        for t in range(max(0, last + 1), scores.shape[0]):
            scores[t, column] = MASKED


@cache
def tiles_region(k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    words, depth = k_dim // 2, -(-k_dim // BLOCK) * TILE
    v_pad = -(-v_dim // BLOCK) * BLOCK
    item_columns, tokens, lanes, side = _ITEM_COLUMNS, _KEYS, TILE, BLOCK
    pairs = tokens // 2
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        q, past_k, past_v, k, v, scale, softcap, window, out, lse = arguments_at("attend prompt", "uint16", arguments)
        batch, heads, n, _ = q.shape
        kv_heads, past = k.shape[1], past_k.shape[2]
        group = heads // kv_heads
        per_head = -(-(n * group) // item_columns)
        items = batch * kv_heads * per_head
        factor = np.float32(1) if softcapped else np.float32(scale * LOG2_E)
        before_cap = np.float32(scale / softcap) if softcapped else np.float32(0)
        # Transposed queries, in tiles of `side` queries.
        transposed_q = scratch(item_columns // side * depth, side).view(np.uint32)
        sums, transposed_sums = scratch(item_columns // side * v_pad, side), scratch(side, v_pad)
        key_words, query_words = scratch(tokens, depth).view(np.uint32), scratch(side, depth).view(np.uint32)
        value_words, transposed_values = scratch(pairs, v_pad).view(np.uint32), scratch(v_pad, pairs).view(np.uint32)
        scores, weights = scratch(tokens, side), scratch(pairs, side).view(np.uint32)
        most, totals = np.empty((2, item_columns), np.float32)
        fresh, rescale = np.empty((2, side), np.float32)
        found = np.empty(64, np.uint8)
        begin_tiles(found)
        # Later queries see more keys. Threads take items in alternating order, to balance the load.
        for turn in range(-(-items // threads)):
            item = turn * threads + (thread if turn % 2 == 0 else threads - 1 - thread)
            if item >= items:
                continue
            index, part = item % (batch * kv_heads), item // (batch * kv_heads)
            row, head = index // kv_heads, index % kv_heads
            first = part * item_columns
            count = min(item_columns, n * group - first)
            key_places, value_places = places_of(past_k, k, row, head), places_of(past_v, v, row, head)
            for tile in range(0, count, side):
                query_words[:] = 0
                for i in range(min(side, count - tile)):
                    token, query = (first + tile + i) // group, head * group + (first + tile + i) % group
                    copy_row(words, row_address(q, row, query, token), query_words, i * depth)
                for d in range(0, depth, lanes):
                    for i in range(0, side, lanes):
                        at = (tile // side * depth + d) * side + i
                        transpose_words(query_words, i * depth + d, depth, transposed_q, at, side)
            most[:], totals[:], sums[:] = LEAST, 0, 0
            end: Any = past + (first + count - 1) // group + 1
            begin: Any = max(0, past + first // group + 1 - window)
            for start in range(begin, end, tokens):
                filled: Any = min(tokens, end - start)
                # Rounded up to whole tiles; every query masks the tokens after the last.
                whole: Any = -(-filled // side) * side
                for t in range(filled):
                    copy_row(words, address_in(key_places, past, start + t), key_words, t * depth)
                for t in range(0, filled - 1, 2):
                    even = address_in(value_places, past, start + t)
                    odd = address_in(value_places, past, start + t + 1)
                    pair_rows(v_dim, even, odd, value_words, (t // 2) * v_pad)
                if filled % 2:
                    last = address_in(value_places, past, start + filled - 1)
                    pair_rows(v_dim, last, last, value_words, (filled // 2) * v_pad)
                for pair in range(0, whole // 2, lanes):
                    for d in range(0, v_dim, lanes):
                        transpose_words(
                            value_words, pair * v_pad + d, v_pad, transposed_values, d * pairs + pair, pairs
                        )
                for tile in range(0, count, side):
                    # The first and the last token of this tile's queries.
                    earliest = past + (first + tile) // group
                    latest = past + (first + min(tile + side, count) - 1) // group
                    if start > latest or start + filled + window <= earliest + 1:
                        continue
                    for t in range(0, whole, side):
                        multiply_by_tiles(
                            0,
                            key_words,
                            t * depth,
                            depth,
                            depth,
                            transposed_q,
                            tile * depth,
                            side,
                            scores,
                            t * side,
                            side,
                        )
                    if softcapped:
                        cap_products(scores, whole, before_cap, softcap)
                    if start + whole - 1 > earliest or start + window <= latest:
                        _mask_unseen(scores[:whole], first + tile, group, start - past, window)
                    below = tile // side * v_pad
                    grown = False
                    for i in range(0, side, lanes):
                        grown |= rows_most(lanes, lanes, scores, i, side, whole, most, tile + i, fresh, i)
                    if grown:
                        rescale_outgrown(most, tile, fresh, factor, totals, rescale, sums, below, v_dim)
                    for i in range(0, side, lanes):
                        lane_weights_bf16(side, scores, i, whole // 2, factor, most, tile + i, weights, totals)
                    for d in range(0, v_pad, side):
                        at = (below + d) * side
                        multiply_by_tiles(
                            1, transposed_values, d * pairs, pairs, whole // 2, weights, 0, side, sums, at, side
                        )
            for tile in range(0, count, side):
                divide_sums(totals, tile, rescale, sums, tile // side * v_pad, v_dim, transposed_sums)
                for i in range(min(side, count - tile)):
                    token, query = (first + tile + i) // group, head * group + (first + tile + i) % group
                    round_row(transposed_sums[i, :v_dim], out[row, token, query])
                    lse[row, query, token] = (most[tile + i] * factor + np.log2(totals[tile + i])) * LN_2
        end_tiles(found)
        return np.int64(0 * code_version)

    return attend
