"""The region that chooses blocks by scores and estimated masses: one for all pools and shapes; threads divide lists."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.chosen_blocks import SOFTMAX, forbid_others, reduced_scores
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.estimated_masses import estimated_shares, fewest_blocks, softmax_and_shares
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from hetero_kv.cpu_ops.top_k import select


@region_arguments("choose")
def arguments(_: str) -> tuple[Any, ...]:
    """The region's arguments.

    (scores, masses, by_mass, outside_lse, unchoosable_lse, allowed, shared, reduce, target, least, most, times,
    positions)

    scores, shared, reduce: as in `chosen_blocks.best_blocks`. allowed: the positions that may be chosen, as its
    `candidates`; negative entries are padding.
    by_mass: whether the scores are the masses, which are then read only once.
    target: 0 to choose `most` blocks; otherwise the share of the attention to reach with as few blocks as possible,
    `least` to `most` of them (`estimated_masses.fewest_blocks`). The shares come from masses [rows, kv_heads, group,
    blocks], outside_lse and unchoosable_lse [rows, kv_heads, group] float32 (`estimated_shares`). times: multiplies the
    number of blocks that are taken, up to all of them.
    counts: [rows] int32, each row's blocks; what lies behind them is not read. positions: [rows, 1 if shared, else
    kv_heads, n] int32, written: the chosen blocks, ascending, padded with -1.
    """
    real4, real3 = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")
    int3, integer = types.Array(types.int32, 3, "C"), types.int64
    flags = types.boolean, integer, types.float64, integer, integer, integer
    counts = types.Array(types.int32, 1, "C")
    return real4, real4, types.boolean, real3, real3, int3, *flags, counts, int3


@device_function
def _first_blocks(numbers, count):
    """Returns the first `count` blocks of numbers [1, heads, group, blocks], which is returned if these are all."""
    _, heads, group, blocks = numbers.shape
    if count == blocks:
        return numbers
    found = np.empty((1, heads, group, count), np.float32)
    for head in range(heads):
        for query in range(group):
            for block in range(count):
                found[0, head, query, block] = numbers[0, head, query, block]
    return found


@device_function
def _choose(
    scores,
    masses,
    by_mass,
    outside_lse,
    unchoosable_lse,
    allowed,
    shared,
    reduce,
    target,
    least,
    most,
    times,
    count,
    positions,
):
    """Choose among the first `count` blocks for one list of one row; arrays as for the region, positions [1, n]."""
    if by_mass and reduce >= SOFTMAX and target > 0:
        own = _first_blocks(masses, count)
        reduced, shares, before = softmax_and_shares(own, outside_lse, unchoosable_lse, shared, reduce != SOFTMAX)
    else:
        reduced = reduced_scores(_first_blocks(scores, count), shared, reduce)
        if target > 0:
            own = _first_blocks(masses, count)
            shares, before = estimated_shares(own, outside_lse, unchoosable_lse, shared)
    blocks = reduced.shape[1]
    among = blocks
    if allowed.shape[2] > 0:
        forbid_others(reduced, allowed)
        among = allowed.shape[2]
    counts = np.full(1, most, np.int32)
    if target > 0:
        counts = fewest_blocks(reduced, shares, before, target, least, most)
    counts[0] = min(counts[0] * times, among, positions.shape[1])
    positions[:] = -1
    select(reduced, np.full(1, blocks, np.int32), counts, positions)


@cache
def region() -> int:
    """Returns the address of the region."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def choose(thread, threads, arguments):
        (
            scores,
            masses,
            by_mass,
            outside_lse,
            unchoosable_lse,
            allowed,
            shared,
            reduce,
            target,
            least,
            most,
            times,
            counts,
            positions,
        ) = arguments_at("choose", "", arguments)
        rows, kv_heads, group, blocks = scores.shape
        lists, heads = rows if shared else rows * kv_heads, kv_heads if shared else 1
        # Each list becomes one row.
        score_rows = scores.reshape(lists, heads, group, blocks)
        mass_rows = masses.reshape(lists, heads, group, masses.shape[3])
        outside_rows, unchoosable_rows = (
            outside_lse.reshape(lists, heads, group),
            unchoosable_lse.reshape(lists, heads, group),
        )
        chosen = positions.reshape(lists, 1, positions.shape[2])
        anything = allowed.shape[2] == 0
        allowed_rows = allowed if anything else allowed.reshape(lists, 1, allowed.shape[2])
        for each in range(lists * thread // threads, lists * (thread + 1) // threads):
            _choose(
                score_rows[each : each + 1], mass_rows[each : each + 1], by_mass, outside_rows[each : each + 1],
                unchoosable_rows[each : each + 1], allowed_rows if anything else allowed_rows[each : each + 1],
                shared, reduce, target, least, most, times, counts[each * rows // lists], chosen[each],
            )  # fmt: skip
        return np.int64(0 * code_version)

    return address_of(choose)
