"""The kernel of `cpu_ops.retrieval_step`, a pipeline: store, score, choose, attend, and estimate the rest.

Two kernels are compiled from this source. One has the optional stages of `estimating_stages`; the other has none, and
compiles in half the time.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types
from numba.np.unsafe.ndarray import to_fixed_tuple

from hetero_kv.cpu_ops.block_groups import numbers_into, places_of
from hetero_kv.cpu_ops.chosen_blocks import attended_ids, blocks_in_use
from hetero_kv.cpu_ops.chosen_tokens import keep_chosen
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function, kernel_part
from hetero_kv.cpu_ops.estimated_masses import take_out
from hetero_kv.cpu_ops.estimating_run import Run
from hetero_kv.cpu_ops.estimating_stages import (
    add_rest,
    choose_blocks,
    choose_tokens,
    score_blocks,
    score_groups,
)
from hetero_kv.cpu_ops.list_attention import OFFSETS
from hetero_kv.cpu_ops.step_contract import (
    AS_GIVEN,
    ATTENDED,
    ATTENDER,
    BAD_CONTEXT,
    BAD_LISTS,
    BAD_PLACE,
    BAD_SHAPES,
    CAUSAL,
    CHOSEN,
    EVERYTHING,
    LONG,
    TOKEN_ATTENDER,
    TOUCHED,
    WHOLE,
    StepSettings,
)
from hetero_kv.cpu_ops.step_parts import (
    are_drafted,
    are_ranges,
    as_rows_of_heads,
    contexts,
    copy_into,
    end_of_draft,
    end_of_run,
    merge_into,
    show_up_to,
    sums_of_powers,
    write_numbers,
)
from hetero_kv.cpu_ops.step_stages import are_in_pool, attend, attend_causally, choose_by_scores, fits, store
from hetero_kv.cpu_ops.untyped_arrays import items_of

_SETTINGS = len(StepSettings._fields)
_POOL, _INTEGERS = types.Array(types.uint8, 4, "C"), types.Array(types.int64, 1, "C")
_INT3, _INT2, _INT1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
_LONG2, _LSE = types.Array(types.int64, 2, "C"), types.Array(types.float32, 3, "C")
_DERIVED = types.Tuple([_POOL] * 5)
_ESTIMATES = types.Tuple([_LSE, types.Array(types.float32, 4, "C"), _LONG2, _INT3])


@device_function
def _named(settings):
    return StepSettings(*to_fixed_tuple(settings, _SETTINGS))


@cache
def kernel_for(dtype: str, estimates: bool) -> Any:
    """Compile the kernel for queries of `dtype`, or load it from the cache; it serves pools of all storage types.

    estimates: whether it has the optional stages. Then `derived` are the value means, the keys and means by which
    candidates are scored, and the groups' vectors and value means, and `results` a `retrieval_step.StepEstimates`, both
    as plain tuples; otherwise both are None.
    """
    code_version = CODE_VERSION
    qkv, real, flag = types.Array(from_dtype(np.dtype(dtype)), 4, "C"), types.float64, types.boolean
    pool = _POOL, _POOL, OFFSETS, _POOL, _INT1, _DERIVED if estimates else types.none
    call = _LONG2, _INT2, types.int64, _INT3, _INT3, flag, real, real, real, _INTEGERS, _INTEGERS
    signature = real(qkv, qkv, qkv, *pool, *call, qkv, _LSE, _ESTIMATES if estimates else types.none)

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def step(
        q, k, v, keys, values, key_offsets, representatives, lengths, derived, ranges, table, which, positions, allowed,
        shared, scale, softcap, target, calls, numbers, out, lse, results,
    ):  # fmt: skip
        settings = _named(numbers)
        keys, values = items_of(keys, settings.key_bytes), items_of(values, settings.value_bytes)
        representatives = items_of(representatives, settings.vector_bytes)
        rows, kv_heads, group = q.shape[0], keys.shape[1], settings.group
        if not fits(q, k, v, ranges, table, which, positions, allowed, out, lse, kv_heads, settings):
            return BAD_SHAPES
        if estimates:
            means = items_of(derived[0], settings.mean_bytes), items_of(derived[4], settings.mean_bytes)
            coarse = items_of(derived[1], settings.coarse_bytes), items_of(derived[2], settings.coarse_mean_bytes)
            group_vectors = items_of(derived[3], settings.vector_bytes)
            outside_lse, masses, taken, recorded = results
            capacity = positions.shape[2] * settings.block_size
            if (
                outside_lse.shape != lse.shape
                or masses.shape != (2, rows, kv_heads, group)
                or taken.shape != (rows, WHOLE + 1)
                or (recorded.size > 0 and recorded.shape != (rows, positions.shape[1], capacity))
            ):
                return BAD_SHAPES
            taken[:] = 0
        stored = store(k, v, keys, values, table, ranges, calls) + np.float64(0 * code_version)
        if stored < 0:
            return BAD_PLACE
        queries = as_rows_of_heads(q).reshape(rows, kv_heads, group, settings.k_dim)
        attended = np.empty((rows, kv_heads, group, settings.v_dim), np.float32)
        used, firsts, ends = blocks_in_use(table), ranges[1], ranges[2]
        if which == EVERYTHING:
            # No block belongs to a Context, of which something could be left out.
            positions = np.empty((rows, 1, 0), np.int32)
            firsts = ends = np.zeros(rows, np.int64)
        elif not are_ranges(firsts, ends, used):
            return BAD_CONTEXT
        pool = keys, values, key_offsets, lengths
        drafted, start = are_drafted(ranges[0], table, used, settings.block_size), 0
        while start < rows:
            stop = rows
            if drafted:
                stop = end_of_draft(ranges[0], table, used, settings.block_size, start)
                is_long = used[stop - 1, 0] * settings.block_size >= LONG and calls[CAUSAL] != 0
                if which == EVERYTHING and stop > start + 1 and is_long:
                    for row in range(start, stop):
                        show_up_to(ranges[0, row], table[row], lengths, settings.block_size)
                    nothing, none = np.empty((1, 1, 0), np.int32), np.zeros(1, np.int64)
                    ids, counts = attended_ids(table[stop - 1 : stop], nothing, none, none)
                    if settings.rehearses == 0 and not attend_causally(
                        queries[start:stop], pool, ids, counts, scale, softcap, settings, calls, attended[start:stop],
                        lse[start:stop],
                    ):  # fmt: skip
                        return BAD_LISTS
                    if estimates:
                        copy_into(lse[start:stop], masses[0, start:stop])
                        copy_into(lse[start:stop], masses[1, start:stop])
                    start = stop
                    continue
            # Drafted tokens choose together.
            if estimates:
                stop = min(stop, end_of_run(firsts, ends, start, settings.group_blocks > 1))
            elif drafted:
                stop = start + 1
            if estimates:
                context, counts = contexts(table[start:stop], firsts[start:stop], ends[start:stop])
                if not are_in_pool(context, counts, len(keys)):
                    return BAD_CONTEXT
                most = min(positions.shape[2], context.shape[1])
                run = Run(
                    queries[start:stop], ranges[0, start:stop], drafted, table[start:stop], firsts[start:stop],
                    ends[start:stop], context, counts, positions[start:stop], allowed[start:stop], which, shared,
                    scale, softcap, target, most, outside_lse[start:stop], attended[start:stop], lse[start:stop],
                    masses[0, start:stop], masses[1, start:stop], taken[start:stop], recorded[start:stop],
                )  # fmt: skip
                if not _attend_to_run(run, pool, representatives, coarse, group_vectors, means, settings, calls):
                    return BAD_LISTS
            else:
                if drafted:
                    # Each attends to its block up to its own token, as in a call of its own.
                    show_up_to(ranges[0, start], table[start], lengths, settings.block_size)
                own = queries[start:stop], table[start:stop], firsts[start:stop], ends[start:stop]
                places = positions[start:stop]
                if which == CHOSEN:
                    context, counts = contexts(own[1], own[2], own[3])
                    if not choose_by_scores(
                        own[0], representatives, context, counts, places, allowed[start:stop], shared, settings, calls
                    ):
                        return BAD_CONTEXT
                ids, counts = attended_ids(own[1], places, own[2], own[3])
                if settings.rehearses == 0 and not attend(
                    own[0], pool, ids, counts, scale, softcap, settings, calls, ATTENDER, attended[start:stop],
                    lse[start:stop],
                ):  # fmt: skip
                    return BAD_LISTS
            start = stop
        if settings.rehearses == 0:
            write_numbers(attended.reshape(rows, kv_heads * group, settings.v_dim), out)
        return stored

    return step


@kernel_part
def _attend_to_run(run, pool, representatives, coarse, group_vectors, means, settings, calls):
    """Score, choose, attend and estimate the rest, for the rows of a run; returns whether lists lie in the pool.

    pool: keys, values, key_offsets, lengths. coarse: keys and means by which candidates are scored. means: mean values
    of blocks and groups.
    """
    chooses, outside_lse = run.context.shape[1] > 0, run.outside_lse
    by_token = settings.tokens > 0 and chooses
    separate = by_token or (chooses and run.which == CHOSEN and run.target > 0)
    nothing = np.empty((len(run.table), 1, 0), np.int32)
    ids, counts = attended_ids(run.table, nothing, run.firsts, run.ends)
    window, window_lse = np.empty(run.attended.shape, np.float32), np.empty(run.lse.shape, np.float32)
    if separate:
        # What is always attended counts for the target, so it is computed first.
        if not _attend(run, pool, ids, counts, settings, calls, ATTENDER, window, window_lse):
            return False
        outside_lse = sums_of_powers(window_lse, outside_lse)
    if chooses:
        groups = score_groups(run, group_vectors, settings, calls)
        scores = score_blocks(run, groups, representatives, coarse, settings, calls)
        if run.which == AS_GIVEN:
            places = places_of(run.positions, scores.entries)
        else:
            places = choose_blocks(run, scores, outside_lse, coarse, settings, calls)
    else:
        run.positions[:] = -1
    attender = ATTENDER
    if by_token:
        ids, of_lists, blocks = choose_tokens(run, scores, places, outside_lse, coarse, settings, calls)
        counts, attender = np.empty(of_lists.shape[:2], np.int32), TOKEN_ATTENDER
        if settings.rehearses:
            keep_chosen(run.positions, blocks)
        for row in range(len(of_lists)):
            for each in range(of_lists.shape[1]):
                counts[row, each] = of_lists[row, each, 0]
                run.taken[row, ATTENDED] += of_lists[row, each, 0]
                run.taken[row, TOUCHED] += of_lists[row, each, 1]
                run.taken[row, WHOLE] += of_lists[row, each, 2]
    elif chooses:
        # What is outside the Context is not attended twice.
        if separate:
            rows, blocks_each = run.context.shape
            nowhere, everywhere = np.zeros(rows, np.int64), np.full(rows, blocks_each, np.int64)
            ids, counts = attended_ids(run.context, run.positions, nowhere, everywhere)
        else:
            ids, counts = attended_ids(run.table, run.positions, run.firsts, run.ends)
        for column in (ATTENDED, TOUCHED, WHOLE):
            numbers_into(run.taken, column, run.positions)
    if settings.rehearses:
        return True
    if not _attend(run, pool, ids, counts, settings, calls, attender, run.attended, run.lse):
        return False
    if separate:
        merge_into(run.attended, run.lse, window, window_lse)
    copy_into(run.lse, run.attended_mass)
    if not chooses:
        copy_into(run.lse, run.mass)
        return True
    run.mass[:] = np.nan
    if settings.has_mean:
        if not by_token:
            take_out(scores.weights, places)
            take_out(scores.masses, places)
        # If steps choose by the keys themselves (rerank 0), masses of given positions from means without deviations
        # would be too small.
        is_known = run.which == CHOSEN or settings.rerank != 0 or representatives.shape[2] > 1
        add_rest(run, groups, scores, means, is_known, settings, calls)
    return True


@kernel_part
def _attend(run, pool, ids, counts, settings, calls, attender, out, lse):
    """`step_stages.attend` for the rows of a run; drafted tokens one by one, each to its block up to itself.

    A drafted token's numbers are then those of a call of its own, bit by bit: sums do not depend on where threads
    divide the lists of other rows.
    """
    rows = len(run.table)
    at_once = 1 if run.drafted else rows
    for start in range(0, rows, at_once):
        stop = start + at_once
        if run.drafted:
            show_up_to(run.tokens[start], run.table[start], pool[3], settings.block_size)
        if not attend(
            run.queries[start:stop], pool, ids[start:stop], counts[start:stop], run.scale, run.softcap, settings,
            calls, attender, out[start:stop], lse[start:stop],
        ):  # fmt: skip
            return False
    return True
