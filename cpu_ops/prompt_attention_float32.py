"""Causal attention of a prompt chunk to earlier tokens and to itself, in float32 on any CPU.

It uses the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) for all query heads of a
kv head together, with the register tiles of `causal_attention`: scores have the queries in the lanes. Keys and values
of a few tokens at a time are copied to a core's cache; tokens that no query of a tile sees are not multiplied.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.causal_attention import MASKED
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import ISAS
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.gathered_rows import copy_row, row_address
from hetero_kv.cpu_ops.matrix_tiles import multiply_tile
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.softmax_rows import rows_exp2, rows_most

_TOKENS = 64
"""Tokens that are copied at once."""
_ROWS = 4
"""Rows of a register tile; a tile has 4 vectors of columns on CPUs with 32 vector registers, else 2."""
_ITEM_QUERIES = 512
"""Queries of a work item: their sums fit into the L2 cache."""


@cache
def float32_region(instructions: str, k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    lanes = ISAS[instructions].float_lanes
    most_vectors = 4 if ISAS[instructions].registers == 32 else 2
    k_pad, v_pad = -(-k_dim // lanes) * lanes, -(-v_dim // lanes) * lanes
    width, item_queries = most_vectors * lanes, _ITEM_QUERIES
    v_full = v_pad // width * width
    v_rest = (v_pad - v_full) // lanes
    tokens, height, wide, masked = _TOKENS, _ROWS, most_vectors == 4, MASKED
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        q, past_k, past_v, k, v, scale, softcap, window, out, lse = arguments_at("attend prompt", "float32", arguments)
        batch, heads, n, _ = q.shape
        kv_heads, past = k.shape[1], past_k.shape[2]
        group = heads // kv_heads
        items = batch * kv_heads * -(-(n * group) // item_queries)
        factor = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        # The queries of a tile are contiguous, so that they stay in the L1 cache.
        transposed_q = scratch(item_queries // width, k_dim * width)
        query, scores = scratch(1, k_pad), scratch(tokens, width)
        keys, values, sums = scratch(tokens, k_pad), scratch(tokens, v_pad), scratch(item_queries, v_pad)
        most, fresh, totals = np.empty((3, item_queries), np.float32)
        # Later queries see more keys. Threads take items in alternating order, to balance the load.
        for turn in range(-(-items // threads)):
            item = turn * threads + (thread if turn % 2 == 0 else threads - 1 - thread)
            if item >= items:
                continue
            index, part = item % (batch * kv_heads), item // (batch * kv_heads)
            row, head = index // kv_heads, index % kv_heads
            first = part * item_queries
            count = min(item_queries, n * group - first)
            for at in range(count):
                token, of_group = (first + at) // group, (first + at) % group
                copy_row(k_dim, row_address(q, row, head * group + of_group, token), query, 0)
                for d in range(k_dim):
                    transposed_q[at // width, d * width + at % width] = query[0, d] * factor
            most[:], totals[:], sums[:] = -np.inf, 0, 0
            end = past + (first + count - 1) // group + 1
            for start in range(max(0, past + first // group + 1 - window), end, tokens):
                filled = min(tokens, end - start)
                for t in range(filled):
                    token = start + t
                    if token < past:
                        key, value = row_address(past_k, row, head, token), row_address(past_v, row, head, token)
                    else:
                        key, value = row_address(k, row, head, token - past), row_address(v, row, head, token - past)
                    copy_row(k_dim, key, keys, t * k_pad)
                    copy_row(v_dim, value, values, t * v_pad)
                column = np.int64(0)
                while column < count:
                    left = -(-(count - column) // lanes)
                    vectors = np.int64(4 if wide and left >= 4 else 2 if left >= 2 else 1)
                    stop = min(column + vectors * lanes, count)
                    # The tile's first and last query see the tokens of this pass before these.
                    first_end = past + (first + column) // group + 1 - start
                    last_end = past + (first + stop - 1) // group + 1 - start
                    begin = max(0, first_end - window) // height * height
                    seen = min(filled, last_end)
                    if begin >= seen:
                        column += vectors * lanes
                        continue
                    q_at = column // width * (k_dim * width) + column % width
                    for t in range(begin, seen, height):
                        if wide and vectors == 4:
                            multiply_tile(
                                lanes, height, 4, 0, keys, t * k_pad, k_pad, 1, k_dim,
                                transposed_q, q_at, width, scores, t * width, width,
                            )  # fmt: skip
                        elif vectors == 2:
                            multiply_tile(
                                lanes, height, 2, 0, keys, t * k_pad, k_pad, 1, k_dim,
                                transposed_q, q_at, width, scores, t * width, width,
                            )  # fmt: skip
                        else:
                            multiply_tile(
                                lanes, height, 1, 0, keys, t * k_pad, k_pad, 1, k_dim,
                                transposed_q, q_at, width, scores, t * width, width,
                            )  # fmt: skip
                    if softcapped:
                        for t in range(begin, seen):
                            row_softcap(scores, t, stop - column, np.float32(softcap) * LOG2_E)
                    if first_end < seen or last_end - window > begin:
                        for at in range(column, stop):
                            own_end = past + (first + at) // group + 1 - start
                            for t in range(begin, min(own_end - window, seen)):
                                scores[t, at - column] = masked
                            for t in range(max(begin, own_end), seen):
                                scores[t, at - column] = masked
                    s_at, many = begin * width, seen - begin
                    for each in range(vectors):
                        own = column + each * lanes
                        if rows_most(lanes, lanes, scores, s_at + each * lanes, width, many, most, own, fresh, own):
                            for i in range(own, own + lanes):
                                rescale = exp2(most[i] - fresh[i])
                                most[i] = fresh[i]
                                totals[i] *= rescale
                                for d in range(v_pad):
                                    sums[i, d] *= rescale
                        rows_exp2(lanes, scores, s_at + each * lanes, width, many, most, own, totals, own)
                    for i in range(0, vectors * lanes, height):
                        place = (column + i) * v_pad
                        for d in range(0, v_full, width):
                            multiply_tile(
                                lanes, height, most_vectors, 1, scores, s_at + i, 1, width, many,
                                values, begin * v_pad + d, v_pad, sums, place + d, v_pad,
                            )  # fmt: skip
                        if v_rest > 0:
                            multiply_tile(
                                lanes, height, v_rest, 1, scores, s_at + i, 1, width, many,
                                values, begin * v_pad + v_full, v_pad, sums, place + v_full, v_pad,
                            )  # fmt: skip
                    column += vectors * lanes
            for at in range(count):
                token, of_head = (first + at) // group, head * group + (first + at) % group
                share = np.float32(1) / totals[at]
                for d in range(v_dim):
                    out[row, token, of_head, d] = sums[at, d] * share
                lse[row, of_head, token] = (most[at] + np.log2(totals[at])) * LN_2
        return np.int64(0 * code_version)

    return attend
