"""The stages that every retrieval step has: checks, storing the token, choosing by scores, attending.

`estimating_stages` has the optional ones. Each calls kernels and regions by their addresses in `calls`.
"""

import numpy as np

from hetero_kv.cpu_ops.block_groups import entry_ids
from hetero_kv.cpu_ops.chosen_blocks import best_blocks, in_context
from hetero_kv.cpu_ops.device_function import kernel_part
from hetero_kv.cpu_ops.kernel_address import call_kernel
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.step_contract import (
    ATTENDER,
    CAUSAL,
    CAUSAL_TILES,
    CHOOSE,
    CHOSEN,
    EVERYTHING,
    RUN,
    SCORE,
    SCORER,
    STORE,
)
from hetero_kv.cpu_ops.step_parts import as_rows_of_heads, by_head, copy_into, forget_behind, has_token, head_rows
from hetero_kv.cpu_ops.untyped_arrays import UNTYPED, UNTYPED_POOL

# From this many scores on, threads divide the lists; with fewer, one thread chooses in about 0.1 ms.
_TOGETHER = 16384


@kernel_part
def fits(q, k, v, ranges, table, which, positions, allowed, out, lse, kv_heads, settings):
    """Returns whether a call's arrays have the shapes that the step is bound to."""
    rows, group, k_dim, v_dim = q.shape[0], settings.group, settings.k_dim, settings.v_dim
    heads = kv_heads * group
    return not (
        q.shape != (rows, heads, 1, k_dim)
        or out.shape != (rows, heads, 1, v_dim)
        or lse.shape != (rows, kv_heads, group)
        or table.shape[0] != rows
        or ranges.shape != (3, rows)
        or (has_token(ranges) and (k.shape != (rows, kv_heads, 1, k_dim) or v.shape != (rows, kv_heads, 1, v_dim)))
        or (which != EVERYTHING and (positions.shape[0] != rows or positions.shape[1] not in (1, kv_heads)))
        or (which == CHOSEN and allowed.shape[2] > 0 and allowed.shape[:2] != positions.shape[:2])
        or (which == CHOSEN and allowed.shape[2] > 0 and allowed.shape[2] < positions.shape[2])
    )


@kernel_part
def store(k, v, keys, values, table, ranges, calls):
    """Store the tokens of rows that have one; returns the largest magnitude, or a negative number for a bad place."""
    if not has_token(ranges):
        return np.float64(0)
    arguments = as_rows_of_heads(k), as_rows_of_heads(v), keys, values, table, ranges[0]
    return np.float64(call_kernel("store", UNTYPED_POOL, calls[STORE], arguments))


@kernel_part
def are_in_pool(context, counts, blocks):
    """Returns whether the first counts [rows] ids of each row of context [rows, n] are below `blocks`."""
    for row in range(len(context)):
        for entry in range(counts[row]):
            if context[row, entry] < 0 or context[row, entry] >= blocks:
                return False
    return True


@kernel_part
def choose_by_scores(queries, representatives, context, counts, positions, allowed, shared, settings, calls):
    """Score the blocks of each row's Context and write the positions of the best.

    queries: [rows, kv_heads, group, k_dim]. context, counts: as from `step_parts.contexts`. Returns whether blocks lie
    in the pool, and allowed positions in the Context.
    """
    rows, kv_heads, group, k_dim = queries.shape
    candidates, threads = allowed.shape[2], settings.threads
    for row in range(rows if candidates > 0 else 0):
        for each in range(allowed.shape[1]):
            for place in range(candidates):
                if allowed[row, each, place] < 0 or allowed[row, each, place] >= counts[row]:
                    return False
    among = candidates if candidates > 0 else context.shape[1]
    block_scores = np.empty((rows, kv_heads, group, among), np.float32)
    scoring = calls[RUN], calls[SCORE], queries, representatives, context, counts, threads, block_scores
    if candidates > 0:
        # Candidates may differ between kv heads, so that arrays have one row per block and kv head.
        entries, every = entry_ids(context, allowed, kv_heads), np.full(rows * kv_heads, among, np.int32)
        by_row = queries.reshape(rows * kv_heads, 1, group, k_dim)
        scoring = (
            calls[RUN], calls[SCORE], by_row, by_head(representatives), entries, every, threads, head_rows(block_scores)
        )  # fmt: skip
    if call_kernel("score", UNTYPED, calls[SCORER], scoring) < 0:
        return False
    if rows * kv_heads * among < _TOGETHER:
        copy_into(best_blocks(block_scores, positions.shape[2], allowed, shared, settings.reduce), positions)
    else:
        zeros, unrestricted = np.zeros((rows, kv_heads, group), np.float32), np.empty((rows, 1, 0), np.int32)
        choose_args = (
            block_scores, block_scores, False, zeros, zeros, unrestricted, shared, settings.reduce, 0.0, np.int64(0),
            np.int64(positions.shape[2]), np.int64(1), np.full(rows, among, np.int32), positions,
        )  # fmt: skip
        run_region("choose", "", calls[RUN], calls[CHOOSE], threads, choose_args)
        if candidates > 0:
            in_context(positions, allowed)
    forget_behind(positions, counts)
    return True


@kernel_part
def attend(queries, pool, ids, counts, scale, softcap, settings, calls, attender, out, lse):
    """Attend to lists of blocks, or of single tokens; returns whether they and their lengths lie in the pool.

    queries: [rows, kv_heads, group, k_dim]. pool: keys, values, key_offsets, lengths. ids: [rows, lists, n] int32, of
    which the first counts [rows, lists] are in use. attender: the place in `calls` of the kernel. out: [rows, kv_heads,
    group, v_dim], lse: [rows, kv_heads, group]; both float32, written.
    """
    rows, kv_heads, group, k_dim = queries.shape
    keys, values, key_offsets, lengths = pool
    arguments = (
        calls[RUN], calls[attender + 1], np.int64(0), queries.reshape(rows, 1, kv_heads, group, k_dim), keys, values,
        key_offsets, ids, counts, lengths, scale, softcap, settings.threads, out, lse,
    )  # fmt: skip
    return call_kernel("attend lists", UNTYPED_POOL, calls[attender], arguments) >= 0


@kernel_part
def attend_causally(queries, pool, ids, counts, scale, softcap, settings, calls, out, lse):
    """As `attend` for consecutive tokens of one sequence, whose blocks ids [1, 1, n] contain them.

    queries: [tokens, kv_heads, group, k_dim]; each sees the tokens up to its own. All share a reading of the blocks.
    """
    tokens, kv_heads, group, k_dim = queries.shape
    keys, values, key_offsets, lengths = pool
    heads_first = np.empty((1, kv_heads, tokens * group, settings.v_dim), np.float32)
    lse_first = np.empty((1, kv_heads, tokens * group), np.float32)
    region = CAUSAL_TILES if tokens * group >= settings.fewest_by_tiles else CAUSAL
    arguments = (
        calls[RUN], calls[region], tokens, queries.reshape(1, tokens, kv_heads, group, k_dim), keys, values,
        key_offsets, ids, counts, lengths, scale, softcap, settings.threads, heads_first, lse_first,
    )  # fmt: skip
    if call_kernel("attend lists", UNTYPED_POOL, calls[ATTENDER], arguments) < 0:
        return False
    for token in range(tokens):
        for head in range(kv_heads):
            for g in range(group):
                lse[token, head, g] = lse_first[0, head, token * group + g]
                for d in range(settings.v_dim):
                    out[token, head, g, d] = heads_first[0, head, token * group + g, d]
    return True
