"""Chooses single tokens of the scored blocks: those that receive the most attention.

The other tokens of a block stay part of the residual: the block's mean key and value stand for fewer tokens then.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.chosen_blocks import LARGEST, LARGEST_SOFTMAX
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.estimated_masses import log_sum_exp, logaddexp, share_from
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_log
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from hetero_kv.cpu_ops.top_k import number_above

_HIGHEST, _BITS = np.uint32(1 << 29), 30
"""The highest bit, and the number of bits, of sort keys: the bits of a float32 from 0 to 1, plus one."""
_INT3 = types.Array(types.int32, 3, "C")
_REAL4, _REAL3 = (types.Array(types.float32, dims, "C") for dims in (4, 3))


@region_arguments("choose tokens")
def choosing_arguments(_: str) -> tuple[Any, ...]:
    """The region's arguments.

    (scores, places, blocks, weights, masses, scored, outside_lse, unchoosable_lse, shared, reduce, target, least, most,
    chosen, counts)

    scores: [rows, kv_heads, group, n * block_size] float32, of the keys of n blocks; overwritten, and of no effect at
    padding. places: [rows, 1 if shared, else kv_heads, n] int32, the indices of these blocks in weights and masses;
    negative for padding. weights, masses: [rows, kv_heads, group, blocks] float32, the log-sum-exp of each block's
    scores, estimated from its mean and computed from its keys. At `places` both are overwritten with the values of the
    tokens that remain in the block, which its mean represents unchanged. scored: [rows] int32, each row's blocks; what
    lies behind them is not read. blocks: as places, the blocks' ids in the pool; overwritten with -1 where no token of
    a block is chosen. outside_lse, unchoosable_lse: [rows, kv_heads, group] float32, the log-sum-exp of what is always
    attended, and of what cannot be chosen. reduce: as in `chosen_blocks.reduced_scores`, applied to the query heads'
    shares of the attention. target: 0 to choose `most` tokens; otherwise the share of the attention to reach with as
    few tokens as possible, `least` to `most` of them. chosen: [rows, lists, n * block_size] int32, written: the tokens'
    indices in the pool, block id * block_size + offset. counts: [rows, lists, 3] int32, written: the numbers of chosen
    tokens, of blocks that have any, and of blocks that are chosen as a whole.
    """
    integer = types.int64
    flags = types.boolean, integer, types.float64, integer, integer
    scored = types.Array(types.int32, 1, "C")
    return _REAL4, _INT3, _INT3, _REAL4, _REAL4, scored, _REAL3, _REAL3, *flags, _INT3, _INT3


@cache
def choosing_region() -> int:
    """Returns the address of the region "choose tokens": one for all pools and shapes; threads divide lists."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def choose(thread, threads, arguments):
        (
            scores, places, blocks, weights, masses, scored, outside_lse, unchoosable_lse, shared, reduce, target,
            least, most, chosen, counts,
        ) = arguments_at("choose tokens", "", arguments)  # fmt: skip
        rows, kv_heads = scores.shape[:2]
        lists, heads = (1, kv_heads) if shared else (kv_heads, 1)
        size = scores.shape[3] // max(1, places.shape[2])
        largest = reduce in (LARGEST, LARGEST_SOFTMAX)
        for index in range(rows * lists * thread // threads, rows * lists * (thread + 1) // threads):
            row, each = index // lists, index % lists
            own, first, its = chosen[row, each], each * heads, _without_padding(places[row, each])
            totals = np.empty((heads, scores.shape[2]), np.float32)
            keys, shares, before = _shares(
                scores[row, first : first + heads], its, size, masses[row, first : first + heads], scored[row],
                outside_lse[row, first : first + heads], unchoosable_lse[row, first : first + heads], largest, totals,
            )  # fmt: skip
            count = _choose(keys, shares, np.float32(target) - before, target > 0, least, most, own)
            taken = np.zeros(places.shape[2], np.int32)
            is_left = _taken_of(own[:count], taken, size, keys.size)
            for head in range(heads):
                at = row, first + head
                _leave(scores[at], totals[head], its, taken, is_left, weights[at], masses[at])
            _to_pool(own[:count], taken, blocks[row, each], size, counts[row, each])
        return np.int64(0 * code_version)

    return address_of(choose)


@device_function
def _without_padding(places):
    """Returns the places [n] up to the last one that is not negative."""
    used = places.size
    while used > 0 and places[used - 1] < 0:
        used -= 1
    return places[:used]


@device_function(error_model="numpy")
def _shares(scores, places, size, masses, scored, outside_lse, unchoosable_lse, largest, totals):
    """Returns the sort keys of tokens, [n] uint32, 0 for padding, their shares [n] float32, and that of `outside_lse`.

    n: the tokens of the blocks at `places`, of `size` tokens each.
    Shares are means over query heads. Sort keys order tokens by the mean share, or by the largest share of any query
    head if `largest`. scores: [heads, group, n or more], the first n overwritten with each query head's shares. masses:
    [heads, group, blocks], of which the first `scored` count. outside_lse, unchoosable_lse: [heads, group]. totals:
    [heads, group], written: the log-sum-exp of all scores.
    """
    heads, group, n = scores.shape[0], scores.shape[1], places.size * size
    shares, most, before = np.zeros(n, np.float32), np.zeros(n, np.float32), np.float32(0)
    weight = np.float32(1) / np.float32(heads * group)
    for head in range(heads):
        for g in range(group):
            inside = log_sum_exp(masses[head, g, :scored])
            total = logaddexp(inside, logaddexp(outside_lse[head, g], unchoosable_lse[head, g]))
            totals[head, g] = total
            before += weight * exp2((outside_lse[head, g] - total) * LOG2_E)
            _to_shares(scores[head, g, :n], total, weight, shares, most, largest)
    # The bits of non-negative floats are ordered as the floats are.
    keys = (most if largest else shares).copy().view(np.uint32)
    keys += np.uint32(1)
    for entry in range(places.size):
        if places[entry] < 0:
            keys[entry * size : (entry + 1) * size] = 0
    return keys, shares, before


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def _to_shares(scores, total, weight, shares, most, largest):
    """Replace scores [n] by their shares of `total`; add them, weighted, to `shares`; update `most` if `largest`."""
    for token in range(scores.size):
        share = exp2((scores[token] - total) * LOG2_E)
        scores[token] = share
        shares[token] += weight * share
    if largest:
        for token in range(scores.size):
            most[token] = max(most[token], scores[token])


@device_function(error_model="numpy")
def _choose(keys, shares, needed, has_target, least, most, chosen):
    """Write the indices of the tokens with the largest keys [n] to chosen [n], ascending; returns their number.

    That number is `most`, or, if `has_target`, the fewest tokens, `least` to `most`, whose shares sum to `needed`. Ties
    go to the lower index.
    """
    there = np.int64(number_above(keys, np.uint32(0)))
    most, count, lowest = min(most, there), min(most, there), np.uint32(0)
    if has_target:
        count = np.int64(0)
        if needed > 0:
            for bit in range(_BITS):
                tried = lowest | (_HIGHEST >> np.uint32(bit))
                if share_from(keys, shares, tried) >= needed:
                    lowest = tried
            reached, count = share_from(keys, shares, lowest + np.uint32(1)), np.int64(number_above(keys, lowest))
            for token in range(keys.size if lowest > 0 else 0):
                if reached >= needed:
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
    ties, place, threshold = count - number_above(keys, lowest), np.int64(0), np.uint32(lowest)
    if number_above(keys, lowest - np.uint32(1)) == count:
        # No ties are left out, and no branch is taken: what is not chosen is overwritten by the next token.
        end = min(count, keys.size - 1)
        behind = chosen[end]
        for token in range(keys.size):
            chosen[place] = token
            place += np.int64(keys[token] >= threshold)
        if count <= end:
            chosen[end] = behind
        return count
    for token in range(keys.size):
        if keys[token] >= lowest:
            if keys[token] == lowest:
                if ties == 0:
                    continue
                ties -= 1
            chosen[place] = token
            place += 1
    return count


@device_function
def _taken_of(chosen, taken, size, n):
    """Count the tokens of each block among `chosen`, ascending indices below n, in taken [blocks], which holds zeros.

    size: a block's tokens.
    Returns [n] float32, 1 for a token that remains and 0 for a chosen one.
    """
    is_left, entry = np.ones(n, np.float32), 0
    for index in chosen:
        while index >= (entry + 1) * size:
            entry += 1
        is_left[index] = 0
        taken[entry] += 1
    return is_left


@device_function
def _to_pool(chosen, taken, blocks, size, counts):
    """Turn `chosen`, indices in blocks of `size` tokens, into indices in the pool, and write `counts`.

    Sets blocks to -1 where no token of a block is chosen.
    """
    entry = 0
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


@device_function(error_model="numpy")
def _leave(shares, totals, places, taken, is_left, weights, masses):
    """Set weights and masses [group, blocks] at `places` to those of the tokens that remain in each block.

    shares: [group, n or more], fractions of `totals` [group]. taken, is_left: from `_taken_of`.
    """
    group, entries = shares.shape[0], places.size
    size = is_left.size // max(1, entries)
    fewer, left = np.empty(size + 1, np.float32), np.empty((1, entries), np.float32)
    for count in range(size + 1):
        fewer[count] = np.log(count / size)
    of_blocks = is_left.reshape(entries, size)
    for g in range(group):
        _remaining(shares[g, : entries * size].reshape(entries, size), of_blocks, left)
        row_log(left, 0, entries, totals[g])
        for entry in range(entries):
            place = places[entry]
            if place >= 0 and taken[entry] > 0:
                weights[g, place] += fewer[size - taken[entry]]
                masses[g, place] = left[0, entry]


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _remaining(shares, is_left, left):
    """Write the sums of shares [blocks, tokens] of each block's tokens that remain to left [1, blocks]."""
    for entry in range(shares.shape[0]):
        total = np.float32(0)
        for t in range(shares.shape[1]):
            total += is_left[entry, t] * shares[entry, t]
        left[0, entry] = total


@device_function
def pool_blocks(places, entries, context):
    """Returns the pool ids, or -1, of the blocks at places [rows, lists, n] among entries [rows, lists, entries].

    entries: positions in context [rows, blocks] int32; places and entries are padded with -1.
    """
    found = np.full(places.shape, -1, np.int32)
    for row in range(places.shape[0]):
        for each in range(places.shape[1]):
            for index in range(places.shape[2]):
                if places[row, each, index] >= 0:
                    found[row, each, index] = context[row, entries[row, each, places[row, each, index]]]
    return found


@device_function
def keep_chosen(positions, blocks):
    """Set positions [rows, lists, m] to -1 where blocks [rows, lists, n], n <= m, are negative."""
    for row in range(blocks.shape[0]):
        for each in range(blocks.shape[1]):
            for place in range(blocks.shape[2]):
                if blocks[row, each, place] < 0:
                    positions[row, each, place] = -1
