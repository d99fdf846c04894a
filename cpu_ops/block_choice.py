"""The kernel that chooses blocks by scores and estimated masses, called by address: one for all pools and shapes."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.chosen_blocks import forbid_others, reduced_scores
from cpu_ops.code_version import CODE_VERSION
from cpu_ops.estimated_masses import estimated_shares, fewest_blocks
from cpu_ops.kernel_address import called_as
from cpu_ops.top_k import select


@called_as("choose")
def signature(_: str) -> Any:
    """Of the kernel, to 0.

    (scores, masses, beside, elsewhere, allowed, shared, reduce, target, least, most, times, positions)

    scores, allowed, shared, reduce: as `chosen_blocks.best_blocks` takes them; entries of `allowed` below 0 are none.
    target: 0, for `most` blocks, or the share of the attention that as few as possible are to reach, `least` to `most`
    of them (`estimated_masses.fewest_blocks`), by masses [rows, kv_heads, group, blocks], beside and elsewhere [rows,
    kv_heads, group] float32 (`estimated_shares`). times: how many times so many are taken, as far as there are any.
    positions: [rows, 1 where shared, else kv_heads, n] int32, written: those of the blocks, ascending, and -1 behind
    them.
    """
    real4, real3 = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")
    int3, integer = types.Array(types.int32, 3, "C"), types.int64
    flags = types.boolean, integer, types.float64, integer, integer, integer
    return integer(real4, real4, real3, real3, int3, *flags, int3)


@cache
def kernel() -> Any:
    """Compile it, or load it from Numba's on-disk cache."""
    code_version = CODE_VERSION

    @njit(signature(""), cache=True, nogil=True, error_model="numpy")
    def choose(scores, masses, beside, elsewhere, allowed, shared, reduce, target, least, most, times, positions):
        reduced = reduced_scores(scores, shared, reduce)
        lists, blocks = reduced.shape
        among = blocks
        if allowed.shape[2] > 0:
            forbid_others(reduced, allowed)
            among = allowed.shape[2]
        if target > 0:
            shares, before = estimated_shares(masses, beside, elsewhere, shared)
            counts = fewest_blocks(reduced, shares, before, target, least, most)
        else:
            counts = np.full(lists, most, np.int32)
        for each in range(lists):
            counts[each] = min(counts[each] * times, among, positions.shape[2])
        positions[:] = -1
        select(reduced, np.full(lists, blocks, np.int32), counts, positions.reshape(lists, positions.shape[2]))
        return np.int64(0 * code_version)

    return choose
