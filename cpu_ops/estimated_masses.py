"""Estimated attention shares of the blocks of a Context, and the fewest blocks that reach a target share."""

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, exp2, row_exp2
from hetero_kv.cpu_ops.row_maximum import row_max
from hetero_kv.cpu_ops.top_k import LOWEST, SIGN, number_above, order


@njit(cache=True, nogil=True)
def estimated_shares(log_masses, outside_lse, unchoosable_lse, shared):
    """Returns the blocks' shares of the attention mass, as means over the query heads of a list.

    log_masses: [rows, kv_heads, group, blocks] float32, the estimated log-sum-exp of each block's scores. outside_lse:
    [rows, kv_heads, group] float32, the log-sum-exp of what is always attended; unchoosable_lse: that of what cannot be
    chosen; -inf for nothing. shared: whether all kv heads share one list.

    Returns shares [rows * (1 if shared, else kv_heads), blocks] float32, and the shares of `outside_lse` [rows * ...].
    """
    rows, kv_heads, group, blocks = log_masses.shape
    lists = 1 if shared else kv_heads
    shares, before = np.zeros((rows * lists, blocks), np.float32), np.zeros(rows * lists, np.float32)
    weight = np.float32(1) / np.float32(group * kv_heads // lists)
    for row in range(rows):
        for head in range(kv_heads):
            target = row * lists + (0 if shared else head)
            for query in range(group):
                masses = log_masses[row, head, query]
                total = logaddexp(log_sum_exp(masses), outside_lse[row, head, query])
                total = logaddexp(total, unchoosable_lse[row, head, query])
                if total == -np.inf:
                    continue
                before[target] += weight * exp2((outside_lse[row, head, query] - total) * LOG2_E)
                own = shares[target]
                for block in range(blocks):
                    own[block] += weight * exp2((masses[block] - total) * LOG2_E)
    return shares, before


@njit
def softmax_and_shares(log_masses, outside_lse, unchoosable_lse, shared, largest):
    """Returns `chosen_blocks.reduced_scores` of masses by a softmax, and `estimated_shares`, in one pass over masses.

    largest: whether a list takes the maximum of its query heads' softmax instead of the mean.
    """
    rows, kv_heads, group, blocks = log_masses.shape
    lists = 1 if shared else kv_heads
    reduced = np.zeros((rows * lists, blocks), np.float32)
    shares, before = np.zeros((rows * lists, blocks), np.float32), np.zeros(rows * lists, np.float32)
    weight = np.float32(1) / np.float32(group * kv_heads // lists)
    powers, of_head = np.empty((1, blocks), np.float32), np.empty(blocks, np.float32)
    for row in range(rows):
        for head in range(kv_heads):
            target = row * lists + (0 if shared else head)
            of_head[:] = 0
            for query in range(group):
                masses, around = log_masses[row, head, query], outside_lse[row, head, query]
                other = unchoosable_lse[row, head, query]
                most = row_max(log_masses[row, head], query, blocks)
                highest = max(most, max(around, other))
                if highest == -np.inf:
                    continue
                for block in range(blocks):
                    powers[0, block] = masses[block] * LOG2_E
                within = row_exp2(powers, 0, blocks, highest * LOG2_E)
                around = exp2((around - highest) * LOG2_E)
                total = within + around + exp2((other - highest) * LOG2_E)
                before[target] += weight * (around / total)
                # Blocks whose weight vanishes against the rest are normalised by themselves, to keep their order.
                if within < np.float32(1e-30) and most > -np.inf:
                    for block in range(blocks):
                        powers[0, block] = masses[block] * LOG2_E
                    within = row_exp2(powers, 0, blocks, most * LOG2_E)
                    total = np.float32(np.inf)
                of_list, of_everything = np.float32(1) / within, weight / total
                _add(powers[0], of_list, of_everything, largest, of_head, shares[target])
            for block in range(blocks):
                reduced[target, block] += of_head[block] if largest else of_head[block] / np.float32(group)
    return reduced, shares, before


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def _add(powers, of_list, of_everything, largest, reduced, shares):
    """Add a query head's powers, scaled by `of_everything`, to shares; scaled by `of_list`, to `reduced`.

    If `largest`, reduced takes the maximum instead of the sum.
    """
    for block in range(powers.size):
        own = powers[block] * of_list
        reduced[block] = max(reduced[block], own) if largest else reduced[block] + own
        shares[block] += powers[block] * of_everything


@njit(cache=True, nogil=True)
def fewest_blocks(scores, shares, before, target, least, most):
    """Returns how many blocks, taken by descending score, reach the share `target` of the attention mass.

    scores: [lists, blocks] float32; -inf for a block that must not be chosen. shares: [lists, blocks] float32, and
    before [lists], from `estimated_shares`. least, most: bounds of the result.

    Returns [lists] int32.
    """
    lists, blocks = scores.shape
    counts, keys = np.empty(lists, np.int32), np.empty(blocks, np.uint32)
    for each in range(lists):
        order(scores[each], keys)
        there = number_above(keys, LOWEST)
        needed = np.float32(target - np.float64(before[each]))
        count = np.int64(0)
        if needed > 0:
            # Search bit by bit, as `top_k.select` does, for the highest score from which on blocks reach the target.
            found = np.uint32(0)
            for bit in range(32):
                tried = found | (SIGN >> np.uint32(bit))
                if share_from(keys, shares[each], tried) >= needed:
                    found = tried
            if found <= LOWEST:
                count = there
            else:
                reached = share_from(keys, shares[each], found + np.uint32(1))
                count = number_above(keys, found)
                for block in range(blocks):
                    if reached >= needed:
                        break
                    if keys[block] == found:
                        reached += shares[each, block]
                        count += 1
        counts[each] = min(max(count, least), min(there, most))
    return counts


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def share_from(keys, shares, lowest):
    """Returns the sum of the shares [n] float32 of blocks whose sort keys [n] uint32 are at least `lowest`."""
    # Numba widens shifted numbers to 64 bits; keys compare fastest with 32.
    found, least = np.float32(0), np.uint32(lowest)
    for block in range(keys.size):
        found += shares[block] if keys[block] >= least else np.float32(0)
    return found


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _sum_of_powers(scores, most):
    """Returns Σ exp(score - most) over scores [n] float32."""
    total = np.float32(0)
    for each in range(scores.size):
        total += exp2((scores[each] - most) * LOG2_E)
    return total


@device_function(error_model="numpy")
def log_sum_exp(scores):
    """Returns log Σ exp(score) over scores [n] float32; -inf for n = 0."""
    most = row_max(scores.reshape(1, scores.size), 0, scores.size)
    return most if most == -np.inf else most + np.log(_sum_of_powers(scores, most))


@device_function(error_model="numpy")
def logaddexp(first, second):
    """Returns log(exp(first) + exp(second)) of float32 numbers; -inf if both are."""
    most, least = max(first, second), min(first, second)
    if least == -np.inf:
        return most
    return most + np.log2(np.float32(1) + exp2((least - most) * LOG2_E)) * LN_2


@njit(cache=True, nogil=True)
def take_out(log_masses, positions):
    """Set the mass of blocks at positions [rows, 1 or kv_heads, n] to 0; negative positions are padding."""
    rows, kv_heads, group, _ = log_masses.shape
    lists = positions.shape[1]
    for row in range(rows):
        for head in range(kv_heads):
            for place in range(positions.shape[2]):
                position = positions[row, min(head, lists - 1), place]
                if position >= 0:
                    for query in range(group):
                        log_masses[row, head, query, position] = -np.inf
