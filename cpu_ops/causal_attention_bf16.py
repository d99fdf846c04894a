"""`causal_attention.attend_blocks_causal` in bfloat16, with AVX512_BF16.

Queries are bfloat16, and so are a softmax's weights, as in `run_attention`; products are summed in float32. Keys and
values are stored as bfloat16, or were bfloat16 before they were stored as float16, and are again when they are read. A
query tile has `COLUMNS` queries in the lanes.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.bfloat16_bits import transpose_queries
from hetero_kv.cpu_ops.bfloat16_tiles import (
    COLUMNS,
    LANES,
    add_values_of_lanes_bf16,
    lane_weights_bf16,
    score_tile_bf16,
)
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.gathered_rows import copy_row, pair_rows, round_to_pairs, round_to_words, row_address
from hetero_kv.cpu_ops.listed_keys import LEAST, MASKED
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import prefetch
from hetero_kv.cpu_ops.softmax_rows import rows_most
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of
from hetero_kv.cpu_ops.work_division import keep_part, own_entries

_TOKENS = 96
"""Tokens of a tile: a multiple of `_ROWS`."""
_ROWS = 6
"""Tokens of a register tile of scores."""
_VALUE_ROWS = 4
"""Queries of a register tile of weighted values, a divisor of `COLUMNS`."""


@cache
def region(storage: str, group: int, k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values.

    storage: of keys and values, "bfloat16" or "float16".
    """
    depth, columns, lanes, tokens, height, value_height = k_dim // 2, COLUMNS, LANES, _TOKENS, _ROWS, _VALUE_ROWS
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
        tiles = -(-queries // columns)
        q_pad = tiles * columns
        lists = starts.size - 1
        total = starts[lists]
        scaling = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        # Scaling bfloat16 queries would lose precision, so their scores are scaled instead.
        factor = np.float32(1) if softcapped else scaling
        first, last = total * thread // threads, total * (thread + 1) // threads
        transposed_q = scratch(tiles * depth, columns).view(np.uint32)
        tile_keys = scratch(tokens, depth).view(np.uint32)
        tile_values = scratch(tokens // 2, v_dim).view(np.uint32)
        weights = scratch(tokens // 2 + 1, columns).view(np.uint32)
        scores, sums = scratch(tokens + 1, columns), scratch(q_pad, v_dim)
        most, fresh, totals = np.empty((3, q_pad), np.float32)
        addresses = np.empty(tokens + 1, np.int64)
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
                    for t in range(part):
                        place = row_address(keys, block, head, within + t)
                        if is_rounded:
                            round_to_words(storage, k_dim, place, tile_keys, (filled + t) * depth)
                        else:
                            copy_row(depth, place, tile_keys, (filled + t) * depth)
                        addresses[filled + t] = row_address(values, block, head, within + t)
                    filled += part
                    within += part
                    if within >= count:
                        entry += 1
                        within = np.int64(0)
                if filled == 0:
                    continue
                pairs = (filled + 1) // 2
                # The other half of an incomplete pair, masked below.
                addresses[filled] = addresses[filled - 1]
                for pair in range(pairs):
                    even, odd = addresses[2 * pair], addresses[2 * pair + 1]
                    if is_rounded:
                        round_to_pairs(storage, v_dim, even, odd, tile_values, pair * v_dim)
                    else:
                        pair_rows(v_dim, even, odd, tile_values, pair * v_dim)
                if entry < end:
                    following = np.int64(block_ids[row, which, entry])
                    ahead: Any = min(tokens, np.int64(block_lengths[following]) - within)
                    for t in range(ahead):
                        at = (following * kv_heads + head) * keys.shape[2] + within + t
                        prefetch(keys, at * 2 * depth, 2 * depth)
                        prefetch(values, at * v_dim, v_dim)
                for tile in range(tiles):
                    column = tile * columns
                    stop = min(column + columns, queries)
                    tile_q = transposed_q[tile * depth :]
                    for t in range(0, filled, height):
                        score_tile_bf16(height, depth, columns, tile_keys, t * depth, tile_q, columns, scores[t:])
                    if softcapped:
                        for t in range(filled):
                            for n in range(columns):
                                scores[t, n] *= scaling
                            row_softcap(scores, t, columns, np.float32(softcap) * LOG2_E)
                    # Query n sees the tokens up to base + n // group.
                    if position + filled > base + column // group + 1:
                        for n in range(column, stop):
                            for t in range(max(0, base + n // group + 1 - position), filled):
                                scores[t, n - column] = MASKED
                    if filled % 2:
                        scores[filled] = MASKED
                    for i in range(0, columns, lanes):
                        at = column + i
                        if at >= queries:
                            break
                        if rows_most(lanes, lanes, scores, i, columns, filled, most, at, fresh, at):
                            for n in range(at, at + lanes):
                                if most[n] == fresh[n]:
                                    continue
                                rescale = exp2((most[n] - fresh[n]) * factor)
                                most[n] = fresh[n]
                                totals[n] *= rescale
                                for d in range(v_dim):
                                    sums[n, d] *= rescale
                        lane_weights_bf16(columns, scores, i, pairs, factor, most, at, weights, totals)
                    for i in range(0, stop - column, value_height):
                        add_values_of_lanes_bf16(
                            value_height, v_dim, columns, weights, i, pairs, tile_values, sums, (column + i) * v_dim
                        )
                position += filled
            most[:] *= factor
            edge = 2 * thread + (0 if starts[index] < first else 1)
            whole = starts[index] >= first and starts[index + 1] <= last
            keep_part(
                index, edge, whole, q_pad, q_pad, most[None, :], totals[None, :], sums, edges,
                edge_sums, edge_most, edge_total, out, lse,
            )  # fmt: skip
        return np.int64(0 * code_version)

    return attend
