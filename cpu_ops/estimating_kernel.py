"""The kernel of `cpu_ops.estimating_step`: stores a token, scores and chooses blocks, attends, estimates the others.

It calls the kernels and regions of these parts by address.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.block_groups import (
    entry_ids,
    for_every_head,
    forget_missing,
    group_ids,
    groups_of,
    masses_of,
    number_of,
    opened_entries,
    places_of,
    positions_at,
)
from hetero_kv.cpu_ops.chosen_blocks import attended_ids, blocks_in_use
from hetero_kv.cpu_ops.chosen_tokens import keep_chosen, pool_blocks
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.estimated_masses import take_out
from hetero_kv.cpu_ops.kernel_address import call_kernel
from hetero_kv.cpu_ops.list_attention import OFFSETS
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.retrieval_step import AS_GIVEN, BAD_CONTEXT, BAD_LISTS, BAD_PLACE, BAD_SHAPES, CHOSEN, EVERYTHING
from hetero_kv.cpu_ops.step_parts import (
    are_ranges,
    as_rows_of_heads,
    by_head,
    contexts,
    copy_into,
    has_token,
    head_row,
    head_rows,
    merge_into,
    scale_and_cap,
    sums_of_powers,
    write_numbers,
)
from hetero_kv.cpu_ops.untyped_arrays import UNTYPED, UNTYPED_POOL, items_of


class StepFlags(NamedTuple):
    """Integer settings of a step, an array in this order for the kernel (see `estimating_step.BlockChoice`)."""

    reduce: int
    rerank: int
    least: int
    has_mean: int
    has_codes: int
    estimates: int
    threads: int
    group_blocks: int
    group_factor: int
    tokens: int
    candidates: int
    rehearses: int


@cache
def kernel_for(dtype: str) -> Any:
    """Compile the kernel for queries of `dtype`, or load it from the cache; it serves pools of all storage types."""
    code_version = CODE_VERSION
    qkv = types.Array(from_dtype(np.dtype(dtype)), 4, "C")
    pool = types.Array(types.uint8, 4, "C")
    int3, int2, int1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
    integers, lse3, real = types.Array(types.int64, 1, "C"), types.Array(types.float32, 3, "C"), types.float64
    signature = real(
        qkv, qkv, qkv, pool, pool, pool, pool, pool, pool, OFFSETS, int1, pool, pool,
        types.Array(types.int64, 2, "C"), int2, types.int64, int3, int3, types.boolean, integers,
        real, real, real, integers, integers, integers, lse3, qkv, lse3, types.Array(types.float32, 4, "C"), integers,
        int3,
    )  # fmt: skip

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def step(
        q, k, v, keys, values, representatives, value_means, coarse_keys, coarse_means, key_offsets, lengths,
        group_vectors, group_values, ranges, table, which, positions, allowed, shared, flags, target, scale, softcap,
        addresses, shape, itemsizes, outside_lse, out, lse, masses, taken, recorded,
    ):  # fmt: skip
        (
            reduce,
            rerank,
            least,
            has_mean,
            has_codes,
            estimates,
            threads,
            group_blocks,
            group_factor,
            tokens,
            candidates,
            rehearses,
        ) = flags
        keys, values = items_of(keys, itemsizes[0]), items_of(values, itemsizes[1])
        representatives, value_means = items_of(representatives, itemsizes[2]), items_of(value_means, itemsizes[3])
        coarse_keys, coarse_means = items_of(coarse_keys, itemsizes[4]), items_of(coarse_means, itemsizes[5])
        group_vectors, group_values = items_of(group_vectors, itemsizes[2]), items_of(group_values, itemsizes[3])
        rows, kv_heads = q.shape[0], keys.shape[1]
        group, k_dim, v_dim = shape[0], shape[1], shape[2]
        heads, block_size = kv_heads * group, np.int64(keys.shape[2])
        by_token = tokens > 0 and which != EVERYTHING
        if (
            q.shape != (rows, heads, 1, k_dim)
            or out.shape != (rows, heads, 1, v_dim)
            or lse.shape != (rows, kv_heads, group)
            or outside_lse.shape != lse.shape
            or masses.shape != (2, rows, kv_heads, group)
            or table.shape[0] != rows
            or ranges.shape != (3, rows)
            or (has_token(ranges) and (k.shape != (rows, kv_heads, 1, k_dim) or v.shape != (rows, kv_heads, 1, v_dim)))
            or (which != EVERYTHING and (positions.shape[0] != rows or positions.shape[1] not in (1, kv_heads)))
        ):
            return BAD_SHAPES
        stored = np.float64(0 * code_version)
        if has_token(ranges):
            store_args = as_rows_of_heads(k), as_rows_of_heads(v), keys, values, table, ranges[0]
            stored = np.float64(call_kernel("store", UNTYPED_POOL, addresses[1], store_args))
            if stored < 0:
                return BAD_PLACE
        taken[:] = 0
        queries = as_rows_of_heads(q).reshape(rows, kv_heads, group, k_dim)
        queries_5d = queries.reshape(rows, 1, kv_heads, group, k_dim)
        attended = np.empty((rows, kv_heads, group, v_dim), np.float32)
        if which == EVERYTHING:
            ids_attended, counts = table.copy().reshape(rows, 1, table.shape[1]), blocks_in_use(table)
        else:
            firsts, ends = ranges[1], ranges[2]
            if not are_ranges(firsts, ends, blocks_in_use(table)):
                return BAD_CONTEXT
            context, widths = contexts(table, firsts, ends)
            blocks, lists = context.shape[1], positions.shape[1]
            for row in range(rows):
                if widths[row] != blocks:
                    return BAD_SHAPES
                for entry in range(blocks):
                    if context[row, entry] < 0 or context[row, entry] >= len(keys):
                        return BAD_CONTEXT
            fixed_positions = positions if which == AS_GIVEN else allowed
            groups = blocks // group_blocks if group_blocks > 1 else 0
            most_opened = fixed_positions.shape[2]
            if most_opened == 0:
                most_opened = -(-positions.shape[2] * group_factor // group_blocks)
            if most_opened >= groups:
                groups, most_opened = 0, 0
            opened = np.empty((rows, lists, most_opened), np.int32)
            of_groups = np.empty((rows, kv_heads, group, groups), np.float32)
            group_weights, group_masses = np.empty_like(of_groups), np.empty_like(of_groups)
            grouped = group_ids(context, group_blocks, groups)
            if groups > 0 and (has_mean or (which == CHOSEN and fixed_positions.shape[2] == 0)):
                taken[3] = groups * rows * lists
                if has_mean:
                    mean_args = (
                        queries, group_vectors, grouped, keys.shape[2] * group_blocks, scale, softcap, of_groups,
                        group_weights, group_masses,
                    )  # fmt: skip
                    run_region("mean scores", UNTYPED, addresses[0], addresses[3], threads, mean_args)
                else:
                    in_use = np.full(rows, groups, np.int32)
                    score_args = addresses[0], addresses[3], queries, group_vectors, grouped, in_use, threads, of_groups
                    call_kernel("score", UNTYPED, addresses[2], score_args)
                    scale_and_cap(of_groups, np.float32(scale), np.float32(softcap))
            if fixed_positions.shape[2] > 0:
                groups_of(fixed_positions, group_blocks, groups, opened)
            elif groups > 0:
                choose_args = (
                    of_groups, of_groups, False, outside_lse, outside_lse, allowed, shared, reduce, 0.0, np.int64(0),
                    most_opened, np.int64(1), opened,
                )  # fmt: skip
                run_region("choose", "", addresses[0], addresses[9], threads, choose_args)
            entries = opened_entries(opened, group_blocks, groups, blocks)
            if which == AS_GIVEN:
                places = places_of(positions, entries)
            # From here on arrays have one row per block and kv head, because lists of entries differ between heads.
            count, each_row = entries.shape[2], rows * kv_heads
            ids = entry_ids(context, entries, kv_heads)
            likely = np.empty((rows, kv_heads, group, count), np.float32)
            weights, block_masses = likely[:, :, :, :0].copy(), likely[:, :, :, :0].copy()
            by_row = queries.reshape(each_row, 1, group, k_dim)
            vectors_by_row = by_head(representatives)
            unread = np.empty((each_row, 1, group, 0), np.float32)
            looks_at_all = has_mean != 0 and rerank == 0 and which == CHOSEN
            if has_mean:
                weights, block_masses = np.empty_like(likely), np.empty_like(likely)
            # Scoring coarse copies also computes the means' scores.
            scores_means = has_mean and not (looks_at_all and has_codes)
            if scores_means:
                mean_args = (
                    by_row, vectors_by_row, ids, block_size, scale, softcap, head_rows(likely),
                    head_rows(weights), head_rows(block_masses),
                )  # fmt: skip
                run_region("mean scores", UNTYPED, addresses[0], addresses[3], threads, mean_args)
            if looks_at_all:
                taken[1] = number_of(entries)
                rerank_args = (
                    by_row, by_head(coarse_keys), by_head(coarse_means), ids, np.empty((each_row, 1, 0), np.int32),
                    scale, softcap, head_rows(weights), head_rows(block_masses), unread,
                )  # fmt: skip
                run_region("candidates", UNTYPED_POOL, addresses[0], addresses[4], threads, rerank_args)
            elif which == CHOSEN and not has_mean:
                in_use = np.full(each_row, count, np.int32)
                score_args = addresses[0], addresses[3], by_row, vectors_by_row, ids, in_use, threads, head_rows(likely)
                call_kernel("score", UNTYPED, addresses[2], score_args)
                scale_and_cap(likely, np.float32(scale), np.float32(softcap))
            if has_mean or which == CHOSEN:
                scored_blocks = number_of(entries)
                taken[2] = 0 if has_mean and not scores_means else scored_blocks
                if scored_blocks < entries.size:
                    forget_missing(likely, entries)
                    forget_missing(weights, entries)
                    forget_missing(block_masses, entries)
            if has_mean:
                take_out(group_weights, opened)
                take_out(group_masses, opened)
            unchoosable_lse = masses_of(group_masses) if has_mean else np.full_like(lse, -np.inf)
            taken[4] = number_of(opened)
        separate = by_token or (which == CHOSEN and target > 0)
        out_window, lse_window = attended[:0], outside_lse
        if separate:
            # What is always attended counts for the target, so it is computed first.
            ids_attended, counts = attended_ids(table, np.empty((rows, 1, 0), np.int32), firsts, ends)
            out_window, lse_window = np.empty_like(attended), np.empty_like(lse)
            attend_args = (
                addresses[0], addresses[6], np.int64(0), queries_5d, keys, values, key_offsets, ids_attended, counts,
                lengths, scale, softcap, threads, out_window, lse_window,
            )  # fmt: skip
            if call_kernel("attend lists", UNTYPED_POOL, addresses[5], attend_args) < 0:
                return BAD_LISTS
            outside_lse = sums_of_powers(lse_window, outside_lse)
        if which == CHOSEN:
            most = positions.shape[2]
            looks, scores = has_mean and rerank > 1, block_masses if looks_at_all else likely
            among = places_of(allowed, entries) if allowed.shape[2] > 0 else allowed
            room = allowed.shape[2] if allowed.shape[2] > 0 else count
            places = np.empty((rows, lists, most), np.int32)
            top_k, times, proposed = most, rerank if looks else np.int64(1), places
            if by_token:
                # Tokens are chosen from all proposed blocks.
                top_k, times = min(tokens // block_size, most), candidates
            elif looks:
                proposed = np.empty((rows, lists, min(most * rerank, room)), np.int32)
            choose_args = (
                scores, block_masses, looks_at_all, outside_lse, unchoosable_lse, among, shared, reduce, target, least,
                top_k, times, proposed,
            )  # fmt: skip
            run_region("choose", "", addresses[0], addresses[9], threads, choose_args)
            if looks and not by_token:
                rerank_args = (
                    by_row, by_head(coarse_keys), by_head(coarse_means), ids, for_every_head(proposed, kv_heads),
                    scale, softcap, head_rows(weights), head_rows(block_masses), unread,
                )  # fmt: skip
                run_region("candidates", UNTYPED_POOL, addresses[0], addresses[4], threads, rerank_args)
                taken[1] = number_of(proposed)
                choose_args = (
                    block_masses, block_masses, True, outside_lse, unchoosable_lse, proposed, shared, reduce, target,
                    least, most, np.int64(1), places,
                )  # fmt: skip
                run_region("choose", "", addresses[0], addresses[9], threads, choose_args)
            positions_at(places, entries, positions)
        if by_token:
            if not looks_at_all:
                taken[1] = number_of(places)
            token_scores = np.full((rows, kv_heads, group, places.shape[2] * block_size), -np.inf, np.float32)
            rerank_args = (
                by_row, by_head(coarse_keys), by_head(coarse_means), ids, for_every_head(places, kv_heads), scale,
                softcap, head_rows(weights), head_rows(block_masses), head_rows(token_scores),
            )  # fmt: skip
            run_region("candidates", UNTYPED_POOL, addresses[0], addresses[4], threads, rerank_args)
            chosen = recorded
            if recorded.size == 0:
                chosen = np.empty((rows, lists, token_scores.shape[3]), np.int32)
            elif recorded.shape != (rows, lists, token_scores.shape[3]):
                return BAD_SHAPES
            token_counts = np.empty((rows, lists, 3), np.int32)
            blocks_of = pool_blocks(positions, context)
            choose_token_args = (
                token_scores, places, blocks_of, weights, block_masses, outside_lse, unchoosable_lse, shared,
                reduce, target, least * block_size, tokens, chosen, token_counts,
            )  # fmt: skip
            run_region("choose tokens", "", addresses[0], addresses[10], threads, choose_token_args)
            if rehearses:
                keep_chosen(positions, blocks_of)
                return stored
            for row in range(rows):
                for each in range(lists):
                    taken[0] += token_counts[row, each, 0]
                    taken[5] += token_counts[row, each, 1]
                    taken[6] += token_counts[row, each, 2]
            attend_token_args = (
                addresses[0], addresses[12], np.int64(0), queries_5d, keys, values, key_offsets, chosen,
                token_counts[:, :, 0].copy(), lengths, scale, softcap, threads, attended, lse,
            )  # fmt: skip
            call_kernel("attend lists", UNTYPED_POOL, addresses[11], attend_token_args)
        else:
            if rehearses:
                return stored
            if which != EVERYTHING:
                # What is outside the Context is not attended twice.
                if separate:
                    ids_attended, counts = attended_ids(context, positions, np.zeros_like(ends), ends - firsts)
                else:
                    ids_attended, counts = attended_ids(table, positions, firsts, ends)
                taken[0] = taken[5] = taken[6] = number_of(positions)
            attend_args = (
                addresses[0], addresses[6], np.int64(0), queries_5d, keys, values, key_offsets, ids_attended, counts,
                lengths, scale, softcap, threads, attended, lse,
            )  # fmt: skip
            if call_kernel("attend lists", UNTYPED_POOL, addresses[5], attend_args) < 0:
                return BAD_LISTS
        if separate:
            merge_into(attended, lse, out_window, lse_window)
        copy_into(lse, masses[0])
        copy_into(lse, masses[1])
        if which != EVERYTHING:
            masses[1] = np.nan
            if has_mean:
                if not by_token:
                    take_out(weights, places)
                    take_out(block_masses, places)
                total = np.empty(lse.shape, np.float32)
                rest_args = (
                    addresses[0], addresses[8], by_head(value_means), ids, head_rows(weights), head_rows(block_masses),
                    estimates != 0, threads, head_rows(attended), head_row(lse), head_row(total),
                )  # fmt: skip
                call_kernel("rest", UNTYPED, addresses[7], rest_args)
                # If steps choose by the keys themselves (rerank 0), masses of fixed positions from means without
                # deviations would be too small.
                if which == CHOSEN or rerank != 0 or representatives.shape[2] > 1:
                    copy_into(sums_of_powers(total, unchoosable_lse), masses[1])
                if groups > 0 and estimates != 0:
                    rest_args = (
                        addresses[0], addresses[8], group_values, grouped, group_weights, group_masses, estimates != 0,
                        threads, attended, lse, total,
                    )  # fmt: skip
                    call_kernel("rest", UNTYPED, addresses[7], rest_args)
        write_numbers(attended.reshape(rows, heads, v_dim), out)
        return stored

    return step
