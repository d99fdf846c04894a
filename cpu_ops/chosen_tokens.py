"""Of the blocks that were looked at, the tokens that receive most attention: chosen one by one.

What is left of a block stays part of the rest: its mean key and value stand for as many tokens fewer.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.chosen_blocks import LARGEST, LARGEST_SOFTMAX
from cpu_ops.code_version import CODE_VERSION
from cpu_ops.estimated_masses import log_sum_exp, logaddexp, share_from
from cpu_ops.exponential import LN_2, LOG2_E, exp2, log2
from cpu_ops.inner import inner
from cpu_ops.kernel_address import address_of
from cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from cpu_ops.top_k import number_above

_HIGHEST, _BITS = np.uint32(1 << 29), 30
"""Bits of float32 from 0 to 1, and one."""
_SMALLEST = np.float32(2.0**-126)
"""Shares below it are none."""
_INT3 = types.Array(types.int32, 3, "C")
_REAL4, _REAL3 = (types.Array(types.float32, dims, "C") for dims in (4, 3))


@region_arguments("choose tokens")
def choosing_arguments(_: str) -> tuple[Any, ...]:
    """Of the region.

    (scores, places, blocks, weights, masses, beside, elsewhere, shared, reduce, target, least, most, chosen, counts)

    scores: [rows, kv_heads, group, n * block_size] float32, of the keys of n blocks; written over. places: [rows, 1
    where shared, else kv_heads, n] int32, where these are in weights and masses [rows, kv_heads, group, blocks]
    float32, the log-sum-exps of all blocks' scores, by their means and by themselves; below 0 for none. blocks: as
    places, where they lie in the pool; written: -1 for those of which nothing is chosen. beside, elsewhere: [rows,
    kv_heads, group] float32, of what is attended to in any case, and of what cannot be chosen. reduce: as
    `chosen_blocks.reduced_scores` joins query heads, of their shares of the attention. target: 0, for `most` tokens, or
    the share of the attention that as few as possible are to reach, `least` to `most` of them. chosen: [rows, lists, n
    * block_size] int32, written: where the tokens lie in the pool, counted through all blocks. counts: [rows, lists, 3]
    int32, written: how many these are, of how many blocks, and how many of these are taken as a whole. weights and
    masses are written over, at the places: those of what is left of each block; its mean stands for it as for the
    whole.
    """
    integer = types.int64
    flags = types.boolean, integer, types.float64, integer, integer
    return _REAL4, _INT3, _INT3, _REAL4, _REAL4, _REAL3, _REAL3, *flags, _INT3, _INT3


@cache
def choosing_region() -> int:
    """The address of the region "choose tokens": one for all pools and shapes, a list for a thread."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def choose(thread, threads, arguments):
        (
            scores, places, blocks, weights, masses, beside, elsewhere, shared, reduce, target, least, most, chosen,
            counts,
        ) = arguments_at("choose tokens", "", arguments)  # fmt: skip
        rows, kv_heads = scores.shape[:2]
        lists, heads = (1, kv_heads) if shared else (kv_heads, 1)
        largest = reduce in (LARGEST, LARGEST_SOFTMAX)
        for index in range(rows * lists * thread // threads, rows * lists * (thread + 1) // threads):
            row, each = index // lists, index % lists
            own, first = chosen[row, each], each * heads
            totals = np.empty((heads, scores.shape[2]), np.float32)
            keys, shares, before = _shares(
                scores[row, first : first + heads], places[row, each], masses[row, first : first + heads],
                beside[row, first : first + heads], elsewhere[row, first : first + heads], largest, totals,
            )  # fmt: skip
            count = _choose(keys, shares, np.float32(target) - before, target > 0, least, most, own)
            taken = np.zeros(places.shape[2], np.int32)
            is_left = _taken_of(own[:count], taken, scores.shape[3])
            for head in range(heads):
                at = row, first + head
                _leave(scores[at], totals[head], places[row, each], taken, is_left, weights[at], masses[at])
            _to_pool(own[:count], taken, blocks[row, each], scores.shape[3], counts[row, each])
        return np.int64(0 * code_version)

    return address_of(choose)


@inner(error_model="numpy")
def _shares(scores, places, masses, beside, elsewhere, largest, totals):
    """What tokens are ordered by, [n] uint32, 0 for none, and each one's share of the attention, [n] float32.

    It is the mean share over query heads, or the largest, that orders. scores: [heads, group, n], in whose place each
    head's own shares are written. places: [blocks that are looked at]. masses: [heads, group, blocks], beside and
    elsewhere: [heads, group]. totals: [heads, group], written: the log-sum-exp of everything. Returns the share of what
    is beside too.
    """
    heads, group, n = scores.shape
    shares, most, before = np.zeros(n, np.float32), np.zeros(n, np.float32), np.float32(0)
    weight = np.float32(1) / np.float32(heads * group)
    for head in range(heads):
        for g in range(group):
            total = logaddexp(log_sum_exp(masses[head, g]), logaddexp(beside[head, g], elsewhere[head, g]))
            totals[head, g] = total
            before += weight * exp2((beside[head, g] - total) * LOG2_E)
            _to_shares(scores[head, g], total, weight, shares, most, largest)
    # Of numbers from 0 on the bits are in order.
    keys = (most if largest else shares).copy().view(np.uint32)
    keys += np.uint32(1)
    size = n // max(1, places.size)
    for entry in range(places.size):
        if places[entry] < 0:
            keys[entry * size : (entry + 1) * size] = 0
    return keys, shares, before


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _to_shares(scores, total, weight, shares, most, largest):
    """Replace scores [n] by their shares of `total`; added to `shares` by weight, and the most of them if `largest`."""
    for token in range(scores.size):
        share = exp2((scores[token] - total) * LOG2_E)
        scores[token] = share
        shares[token] += weight * share
    if largest:
        for token in range(scores.size):
            most[token] = max(most[token], scores[token])


@inner(error_model="numpy")
def _choose(keys, shares, wanted, has_target, least, most, chosen):
    """Write the indices of the tokens with the largest keys [n] to chosen [n], ascending; returns how many.

    As many as `most`, or, where there is a target, as few as have the share `wanted` together, of those not less than
    `least`; of equal ones the first.
    """
    there = np.int64(number_above(keys, np.uint32(0)))
    most, count, lowest = min(most, there), min(most, there), np.uint32(0)
    if has_target:
        count = np.int64(0)
        if wanted > 0:
            for bit in range(_BITS):
                tried = lowest | (_HIGHEST >> np.uint32(bit))
                if share_from(keys, shares, tried) >= wanted:
                    lowest = tried
            reached, count = share_from(keys, shares, lowest + np.uint32(1)), np.int64(number_above(keys, lowest))
            for token in range(keys.size if lowest > 0 else 0):
                if reached >= wanted:
                    break
                if keys[token] == lowest:
                    reached += shares[token]
                    count += 1
        limited = min(max(count, least), most)
        if limited != count:
            count, lowest = limited, np.uint32(0)
    if count == 0:
        return np.int64(0)
    if lowest == 0:
        for bit in range(_BITS):
            tried = lowest | (_HIGHEST >> np.uint32(bit))
            if number_above(keys, tried - np.uint32(1)) >= count:
                lowest = tried
    ties, place = count - number_above(keys, lowest), 0
    for token in range(keys.size):
        if keys[token] >= lowest:
            if keys[token] == lowest:
                if ties == 0:
                    continue
                ties -= 1
            chosen[place] = token
            place += 1
    return count


@inner
def _taken_of(chosen, taken, n):
    """Count the tokens of each block among `chosen`, ascending indices of n, in taken [blocks], of zeros before.

    Returns [n] float32, 1 for a token that is left and 0 for a chosen one.
    """
    is_left, size, entry = np.ones(n, np.float32), n // max(1, taken.size), 0
    for index in chosen:
        while index >= (entry + 1) * size:
            entry += 1
        is_left[index] = 0
        taken[entry] += 1
    return is_left


@inner
def _to_pool(chosen, taken, blocks, n, counts):
    """Let `chosen`, indices of n tokens, be where they lie in the pool, and count them (as the region's arguments).

    blocks becomes -1 for those of which nothing is taken.
    """
    size, entry = n // max(1, taken.size), 0
    counts[0], counts[1], counts[2] = chosen.size, 0, 0
    for place in range(chosen.size):
        while chosen[place] >= (entry + 1) * size:
            entry += 1
        chosen[place] += (blocks[entry] - entry) * size
    for entry in range(taken.size):
        counts[1] += taken[entry] > 0
        counts[2] += taken[entry] == size
        if taken[entry] == 0:
            blocks[entry] = -1


@inner(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _leave(shares, totals, places, taken, is_left, weights, masses):
    """Let weights and masses [group, blocks] be those of what is left of the blocks at `places`.

    shares: [group, n], of `totals` [group]. taken, is_left: as from `_taken_of`.
    """
    group, n = shares.shape
    size = n // max(1, places.size)
    for entry in range(places.size):
        place, count = places[entry], size - taken[entry]
        if place < 0 or taken[entry] == 0:
            continue
        fewer = np.float32(np.log(count / size))
        for g in range(group):
            left = np.float32(0)
            for t in range(entry * size, (entry + 1) * size):
                left += is_left[t] * shares[g, t]
            weights[g, place] += fewer
            masses[g, place] = totals[g] + log2(left) * LN_2 if left > _SMALLEST else np.float32(-np.inf)


@inner
def pool_blocks(positions, context):
    """Where the blocks at positions [rows, lists, n] of context [rows, blocks] int32 lie in the pool; -1 for none."""
    found = np.full(positions.shape, -1, np.int32)
    for row in range(positions.shape[0]):
        for each in range(positions.shape[1]):
            for place in range(positions.shape[2]):
                if positions[row, each, place] >= 0:
                    found[row, each, place] = context[row, positions[row, each, place]]
    return found


@inner
def keep_chosen(positions, blocks):
    """Let positions be -1, as for none, where blocks of the same shape are."""
    for row in range(positions.shape[0]):
        for each in range(positions.shape[1]):
            for place in range(positions.shape[2]):
                if blocks[row, each, place] < 0:
                    positions[row, each, place] = -1
