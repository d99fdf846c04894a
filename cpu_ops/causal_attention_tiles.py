"""`causal_attention.attend_blocks_causal` in bfloat16 with AMX tiles, on CPUs that have them.

Numbers are those of `causal_attention_bf16`; but where guesses are verified, a weight of the softmax is the sum of two
bfloat16 numbers, so that tokens are attended to together as precisely as one alone. As in `prompt_attention_tiles`,
queries are in the lanes and output sums have one row per channel of the values, so that nothing is summed across lanes
before the end.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.amx_tiles import BLOCK, TILE, begin_tiles, end_tiles, multiply_by_tiles, transpose_words
from hetero_kv.cpu_ops.bfloat16_bits import transpose_queries
from hetero_kv.cpu_ops.bfloat16_tiles import lane_weights_bf16, split_lane_weights_bf16
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.exponential import LOG2_E
from hetero_kv.cpu_ops.gathered_rows import copy_row, pair_rows, round_to_pairs, round_to_words, row_address
from hetero_kv.cpu_ops.listed_keys import LEAST, MASKED
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import prefetch
from hetero_kv.cpu_ops.softmax_rows import rows_most
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of
from hetero_kv.cpu_ops.tile_softmax import cap_products, rescale_outgrown
from hetero_kv.cpu_ops.work_division import keep_part, own_entries

_TOKENS = 96
"""Tokens that are laid out at once, a multiple of `BLOCK`."""


@cache
def region(storage: str, group: int, k_dim: int, v_dim: int, softcapped: bool, is_precise: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values.

    storage: of keys and values, "bfloat16" or "float16". is_precise: whether weights are two bfloat16 numbers.
    """
    words, depth, v_pad = k_dim // 2, -(-k_dim // BLOCK) * TILE, -(-v_dim // BLOCK) * BLOCK
    tokens, side, lanes = _TOKENS, BLOCK, TILE
    pairs = tokens // 2
    kind, is_rounded = STORAGE_TYPES[storage], storage != "bfloat16"
    numbers, code_version = numbers_of(kind, kind), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        (
            starts, q, keys, values, _, block_ids, block_counts, block_lengths, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        ) = arguments_at("attend lists", numbers, arguments)  # fmt: skip
        q_len, kv_heads = q.shape[1], q.shape[2]
        queries = q_len * group
        q_pad = -(-queries // side) * side
        lists = starts.size - 1
        total = starts[lists]
        factor = np.float32(1) if softcapped else np.float32(scale * LOG2_E)
        before_cap = np.float32(scale / softcap) if softcapped else np.float32(0)
        first, last = total * thread // threads, total * (thread + 1) // threads
        # Transposed queries and output sums, in tiles of `side` queries.
        transposed_q = scratch(q_pad // side * depth, side).view(np.uint32)
        sums, sums_of_queries = scratch(q_pad // side * v_pad, side), scratch(q_pad, v_pad)
        key_words = scratch(tokens, depth).view(np.uint32)
        value_words, transposed_values = scratch(pairs, v_pad).view(np.uint32), scratch(v_pad, pairs).view(np.uint32)
        scores = scratch(tokens, side)
        weights, rests = scratch(pairs, side).view(np.uint32), scratch(pairs, side).view(np.uint32)
        most, totals = np.empty((2, q_pad), np.float32)
        fresh, rescale = np.empty((2, side), np.float32)
        addresses = np.empty(tokens + 1, np.int64)
        found = np.empty(64, np.uint8)
        begin_tiles(found)
        for index in range(lists):
            if starts[index + 1] <= first or starts[index] >= last:
                continue
            row, head = index // kv_heads, index % kv_heads
            which = min(head, block_ids.shape[1] - 1)
            ids, count_of_list = block_ids[row, which], np.int64(block_counts[row, which])
            entry, end, position = own_entries(ids, count_of_list, block_lengths, starts[index], first, last)
            transpose_queries(q[row], head, depth, transposed_q)
            # Of a query that sees none of this thread's tokens, all weights are 0.
            most[:], totals[:], sums[:] = LEAST, 0, 0
            base = starts[index + 1] - q_len
            within = np.int64(0)
            while entry < end:
                filled = np.int64(0)
                while entry < end and filled < tokens:
                    block = np.int64(block_ids[row, which, entry])
                    count = np.int64(block_lengths[block])
                    part = min(count - within, tokens - filled)
                    following = np.int64(block_ids[row, which, min(entry + 1, end - 1)])
                    for t in range(part):
                        # Of the tokens that are laid out next; spread, because a core has few reads under way.
                        there, behind = block, within + t + tokens
                        if behind >= count:
                            there, behind = following, behind - count
                        if behind < keys.shape[2]:
                            at = (there * kv_heads + head) * keys.shape[2] + behind
                            prefetch(keys, at * k_dim, k_dim)
                            prefetch(values, at * v_dim, v_dim)
                        place = row_address(keys, block, head, within + t)
                        if is_rounded:
                            round_to_words(storage, k_dim, place, key_words, (filled + t) * depth)
                        else:
                            copy_row(words, place, key_words, (filled + t) * depth)
                        addresses[filled + t] = row_address(values, block, head, within + t)
                    filled += part
                    within += part
                    if within >= count:
                        entry += 1
                        within = np.int64(0)
                if filled == 0:
                    continue
                # The other half of an incomplete pair, masked below.
                addresses[filled] = addresses[filled - 1]
                for pair in range((filled + 1) // 2):
                    even, odd = addresses[2 * pair], addresses[2 * pair + 1]
                    if is_rounded:
                        round_to_pairs(storage, v_dim, even, odd, value_words, pair * v_pad)
                    else:
                        pair_rows(v_dim, even, odd, value_words, pair * v_pad)
                # Rounded up to whole tiles; the tokens after the last are masked.
                whole: Any = -(-filled // side) * side
                for pair in range(0, whole // 2, lanes):
                    for d in range(0, v_dim, lanes):
                        transpose_words(
                            value_words, pair * v_pad + d, v_pad, transposed_values, d * pairs + pair, pairs
                        )
                for tile in range(0, queries, side):
                    for t in range(0, whole, side):
                        multiply_by_tiles(
                            0, key_words, t * depth, depth, depth, transposed_q, tile * depth, side,
                            scores, t * side, side,
                        )  # fmt: skip
                    if softcapped:
                        cap_products(scores, whole, before_cap, softcap)
                    # Query n sees the tokens up to base + n // group.
                    if position + filled > base + tile // group + 1:
                        for n in range(tile, min(tile + side, queries)):
                            for t in range(max(0, base + n // group + 1 - position), filled):
                                scores[t, n - tile] = MASKED
                    scores[filled:whole] = MASKED
                    grown = False
                    for i in range(0, side, lanes):
                        grown |= rows_most(lanes, lanes, scores, i, side, whole, most, tile + i, fresh, i)
                    below = tile // side * v_pad
                    if grown:
                        rescale_outgrown(most, tile, fresh, factor, totals, rescale, sums, below, v_dim)
                    for i in range(0, side, lanes):
                        if is_precise:
                            split_lane_weights_bf16(
                                side, scores, i, whole // 2, factor, most, tile + i, weights, totals, rests
                            )
                        else:
                            lane_weights_bf16(side, scores, i, whole // 2, factor, most, tile + i, weights, totals)
                    for d in range(0, v_pad, side):
                        at = (below + d) * side
                        multiply_by_tiles(
                            1, transposed_values, d * pairs, pairs, whole // 2, weights, 0, side, sums, at, side
                        )
                        if is_precise:
                            multiply_by_tiles(
                                1, transposed_values, d * pairs, pairs, whole // 2, rests, 0, side, sums, at, side
                            )
                position += filled
            sum_words, query_words = sums.view(np.uint32), sums_of_queries.view(np.uint32)
            for tile in range(0, queries, side):
                for d in range(0, v_dim, lanes):
                    for i in range(0, side, lanes):
                        at = (tile // side * v_pad + d) * side + i
                        transpose_words(sum_words, at, side, query_words, (tile + i) * v_pad + d, v_pad)
            most[:] *= factor
            edge = 2 * thread + (0 if starts[index] < first else 1)
            is_whole = starts[index] >= first and starts[index + 1] <= last
            keep_part(
                index, edge, is_whole, q_pad, q_pad, most[None, :], totals[None, :], sums_of_queries, edges,
                edge_sums, edge_most, edge_total, out, lse,
            )  # fmt: skip
        end_tiles(found)
        return np.int64(0 * code_version)

    return attend
