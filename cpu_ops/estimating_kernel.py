"""The kernel of `cpu_ops.estimating_step`: stores, scores, chooses, attends, and estimates the rest, by address."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, njit, types

from cpu_ops.chosen_blocks import SOFTMAX
from cpu_ops.code_version import CODE_VERSION
from cpu_ops.estimated_masses import logaddexp, take_out
from cpu_ops.exponential import LOG2_E, exp2, tanh
from cpu_ops.kernel_address import call_kernel
from cpu_ops.list_attention import OFFSETS
from cpu_ops.number_bits import number, rounded
from cpu_ops.parallel_region import run_region
from cpu_ops.retrieval_step import BAD_CONTEXT, BAD_LISTS, BAD_PLACE, BAD_SHAPES, CHOSEN, EVERYTHING
from cpu_ops.storage import pool_arrays


class Flags(NamedTuple):
    """What a step is bound to beside arrays, as the kernel is given it: an array of integers in this order."""

    reduce: int
    rerank: int
    least: int
    has_mean: int
    estimates: int
    threads: int


@cache
def kernel_for(dtype: str, numbers: str, kind: str, coarse: str) -> Any:
    """Compile the kernel for queries of `dtype` and pools whose memory is viewed as these, or load it from the cache.

    numbers: keys and values (`storage.numbers_of`). kind: representatives and mean values. coarse: what candidates are
    scored by, and what that differs from, as `numbers`.
    """
    code_version = CODE_VERSION
    given = types.Array(from_dtype(np.dtype(dtype)), 4, "C")
    vectors = types.Array(from_dtype(np.dtype(kind)), 4, "C")
    int3, int2, int1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
    integers, lse3, real = types.Array(types.int64, 1, "C"), types.Array(types.float32, 3, "C"), types.float64
    signature = real(
        given, given, given, *pool_arrays(numbers), vectors, vectors, *pool_arrays(coarse), OFFSETS, int1,
        types.int64, int2, types.int64, types.int64, types.int64, int3, int3, types.boolean, integers, real, real, real,
        integers, integers, lse3, given, lse3, types.Array(types.float32, 4, "C"), integers,
    )  # fmt: skip

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def step(
        q, k, v, keys, values, representatives, value_means, coarse_keys, coarse_means, key_offsets, lengths, position,
        table, first, end, which, positions, allowed, shared, flags, target, scale, softcap, addresses, shape, beside,
        out, lse, masses, taken,
    ):  # fmt: skip
        reduce, rerank, least, has_mean, estimates, threads = flags
        rows, kv_heads = q.shape[0], keys.shape[1]
        group, k_dim, v_dim = shape[0], shape[1], shape[2]
        heads = kv_heads * group
        if (
            q.shape != (rows, heads, 1, k_dim)
            or out.shape != (rows, heads, 1, v_dim)
            or lse.shape != (rows, kv_heads, group)
            or beside.shape != lse.shape
            or masses.shape != (2, rows, kv_heads, group)
            or table.shape[0] != rows
            or (position >= 0 and (k.shape != (rows, kv_heads, 1, k_dim) or v.shape != (rows, kv_heads, 1, v_dim)))
            or (which != EVERYTHING and (positions.shape[0] != rows or positions.shape[1] not in (1, kv_heads)))
        ):
            return BAD_SHAPES
        stored = np.float64(0 * code_version)
        if position >= 0:
            written = _numbers(k), _numbers(v), keys, values, table, position
            stored = np.float64(call_kernel("store", numbers, addresses[1], written))
            if stored < 0:
                return BAD_PLACE
        queries = _numbers(q).reshape(rows, kv_heads, group, k_dim)
        asked = queries.reshape(rows, 1, kv_heads, group, k_dim)
        attended = np.empty((rows, kv_heads, group, v_dim), np.float32)
        if which == EVERYTHING:
            ids = table.copy().reshape(rows, 1, table.shape[1])
            counts = np.full((rows, 1), table.shape[1], np.int32)
        else:
            context = table[:, first:end].copy()
            for row in range(rows):
                for entry in range(end - first):
                    if context[row, entry] < 0 or context[row, entry] >= len(keys):
                        return BAD_CONTEXT
            likely = np.empty((rows, kv_heads, group, end - first), np.float32)
            weights, block_masses = likely[:, :, :, :0].copy(), likely[:, :, :, :0].copy()
            if has_mean:
                weights, block_masses = np.empty_like(likely), np.empty_like(likely)
                scored = (
                    queries, representatives, context, np.int64(keys.shape[2]), scale, softcap, likely, weights,
                    block_masses,
                )  # fmt: skip
                run_region("mean scores", kind, addresses[0], addresses[3], threads, scored)
            elif which == CHOSEN:
                in_use = np.full(rows, end - first, np.int32)
                asking = addresses[0], addresses[3], queries, representatives, context, in_use, threads, likely
                call_kernel("score", kind, addresses[2], asking)
                _scale(likely, np.float32(scale), np.float32(softcap))
        taken[:] = 0
        window_first, window_end = first, end
        separate = which == CHOSEN and target > 0
        out_window, lse_window = attended[:0], beside
        if separate:
            # What is attended to in any case counts for the target, so that it comes first.
            ids, counts = _lists(table, context, positions[:, :1, :0], first, end)
            out_window, lse_window = np.empty_like(attended), np.empty_like(lse)
            attending = (
                addresses[0], addresses[7], np.int64(0), asked, keys, values, key_offsets, ids, counts, lengths, scale,
                softcap, threads, out_window, lse_window,
            )  # fmt: skip
            if call_kernel("attend lists", numbers, addresses[6], attending) < 0:
                return BAD_LISTS
            beside = _sums(lse_window, beside)
            window_first, window_end = 0, table.shape[1]
        if which == CHOSEN:
            most, by = positions.shape[2], reduce
            if reduce >= SOFTMAX:
                run_region("softmax", "", addresses[0], addresses[4], threads, (_lists_of(likely),))
                by = reduce - SOFTMAX
            looks = has_mean and rerank > 1
            room = allowed.shape[2] if allowed.shape[2] > 0 else end - first
            proposed = np.empty((rows, positions.shape[1], min(most * rerank, room)), np.int32) if looks else positions
            times = rerank if looks else np.int64(1)
            choosing = likely, block_masses, beside, allowed, shared, by, target, least, most, times, proposed
            call_kernel("choose", "", addresses[10], choosing)
            if looks:
                looked = (
                    queries, coarse_keys, coarse_means, context, proposed, scale, softcap, weights, block_masses,
                )  # fmt: skip
                run_region("candidates", coarse, addresses[0], addresses[5], threads, looked)
                taken[1] = _number(proposed)
                likely[:] = block_masses
                if reduce >= SOFTMAX:
                    run_region("softmax", "", addresses[0], addresses[4], threads, (_lists_of(likely),))
                choosing = (
                    likely, block_masses, beside, proposed, shared, by, target, least, most, np.int64(1), positions
                )  # fmt: skip
                call_kernel("choose", "", addresses[10], choosing)
        if which != EVERYTHING:
            ids, counts = _lists(table, context, positions, window_first, window_end)
            taken[0] = _number(positions)
        attending = (
            addresses[0], addresses[7], np.int64(0), asked, keys, values, key_offsets, ids, counts, lengths, scale,
            softcap, threads, attended, lse,
        )  # fmt: skip
        if call_kernel("attend lists", numbers, addresses[6], attending) < 0:
            return BAD_LISTS
        if separate:
            _merge(attended, lse, out_window, lse_window)
        masses[0], masses[1] = lse, lse
        if which != EVERYTHING:
            masses[1] = np.nan
            if has_mean:
                take_out(weights, positions)
                take_out(block_masses, positions)
                rest = (
                    addresses[0], addresses[9], value_means, context, weights, block_masses, estimates != 0, threads,
                    attended, lse, masses[1],
                )  # fmt: skip
                call_kernel("rest", kind, addresses[8], rest)
        for row in range(rows):
            for head in range(heads):
                for d in range(v_dim):
                    out[row, head, 0, d] = rounded(out, attended[row, head // group, head % group, d])
        return stored

    return step


@njit
def _numbers(given):
    """A step's [rows, heads, 1, dim] as float32 [rows, heads, dim]."""
    rows, heads, _, dim = given.shape
    found = np.empty((rows, heads, dim), np.float32)
    for row in range(rows):
        for head in range(heads):
            for d in range(dim):
                found[row, head, d] = number(given[row, head, 0, d])
    return found


@njit
def _number(positions):
    """How many of positions [rows, lists, n] are any."""
    found = 0
    flat = positions.reshape(positions.size)
    for each in range(flat.size):
        found += flat[each] >= 0
    return found


@njit
def _lists_of(scores):
    """[rows, kv_heads, group, blocks] as [lists, blocks], the same memory."""
    return scores.reshape(scores.shape[0] * scores.shape[1] * scores.shape[2], scores.shape[3])


@njit
def _scale(scores, scale, softcap):
    """Scale and cap scores as attention's are."""
    flat = scores.reshape(scores.size)
    for each in range(flat.size):
        score = flat[each] * scale
        flat[each] = softcap * tanh(score / softcap) if softcap > 0 else score


@njit
def _lists(table, context, positions, first, end):
    """The blocks of `table` outside of [first, end), then those of `context` at positions, and how many: -1 is none."""
    rows, lists, wanted = positions.shape
    around = first + table.shape[1] - end
    ids, counts = np.empty((rows, lists, around + wanted), np.int32), np.full((rows, lists), around, np.int32)
    for row in range(rows):
        for each in range(lists):
            for block in range(first):
                ids[row, each, block] = table[row, block]
            for block in range(end, table.shape[1]):
                ids[row, each, first + block - end] = table[row, block]
            for place in range(wanted):
                if positions[row, each, place] >= 0:
                    ids[row, each, counts[row, each]] = context[row, positions[row, each, place]]
                    counts[row, each] += 1
    return ids, counts


@njit
def _sums(first, second):
    """log(exp(first) + exp(second)) of two [rows, kv_heads, group]."""
    found = np.empty_like(first)
    for row in range(first.shape[0]):
        for head in range(first.shape[1]):
            for g in range(first.shape[2]):
                found[row, head, g] = logaddexp(first[row, head, g], second[row, head, g])
    return found


@njit(error_model="numpy")
def _merge(out, lse, other, other_lse):
    """Let `out` [rows, kv_heads, group, v_dim] be attention to what `other` is attention to as well."""
    rows, kv_heads, group, v_dim = out.shape
    for row in range(rows):
        for head in range(kv_heads):
            for g in range(group):
                both = logaddexp(lse[row, head, g], other_lse[row, head, g])
                if both == -np.inf:
                    continue
                own = exp2((lse[row, head, g] - both) * LOG2_E)
                its = exp2((other_lse[row, head, g] - both) * LOG2_E)
                for d in range(v_dim):
                    out[row, head, g, d] = own * out[row, head, g, d] + its * other[row, head, g, d]
                lse[row, head, g] = both
