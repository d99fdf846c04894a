"""What share of the attention each block of a context is estimated to receive, and how few blocks reach a share."""

import numpy as np
from numba import njit, types

from cpu_ops.exponential import LN_2, LOG2_E, exp2, row_exp2
from cpu_ops.inner import inner
from cpu_ops.row_maximum import row_max
from cpu_ops.top_k import LOWEST, SIGN, number_above, order

_LSE = types.Array(types.float32, 3, "C")


@njit(cache=True, nogil=True)
def estimated_shares(log_masses, beside, elsewhere, shared):
    """Shares of the attention mass, the means over the query heads that choose together.

    log_masses: [rows, kv_heads, group, blocks] float32, the estimated log-sum-exp of each block's scores. beside:
    [rows, kv_heads, group] float32, the log-sum-exp of what is attended to in any case; elsewhere, likewise, of what
    cannot be chosen. -inf where that is nothing.
    shared: whether all kv heads choose together.

    Returns shares [rows * (1 where shared, else kv_heads), blocks] float32, and those of what is beside [rows * ...].
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
                total = logaddexp(log_sum_exp(masses), beside[row, head, query])
                total = logaddexp(total, elsewhere[row, head, query])
                if total == -np.inf:
                    continue
                before[target] += weight * exp2((beside[row, head, query] - total) * LOG2_E)
                own = shares[target]
                for block in range(blocks):
                    own[block] += weight * exp2((masses[block] - total) * LOG2_E)
    return shares, before


@njit
def softmax_and_shares(log_masses, beside, elsewhere, shared, largest):
    """`chosen_blocks.reduced_scores` of masses by a softmax, and `estimated_shares`, by one look at each of them.

    largest: whether a list takes the maximum of its query heads' softmax, instead of the mean.
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
                masses, around = log_masses[row, head, query], beside[row, head, query]
                other = elsewhere[row, head, query]
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
                # Where all that can be chosen has no weight beside the rest, it is ordered all the same.
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


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _add(powers, of_list, of_everything, largest, reduced, shares):
    """Add a query head's powers, once by each factor; or take the maximum of the first."""
    for block in range(powers.size):
        own = powers[block] * of_list
        reduced[block] = max(reduced[block], own) if largest else reduced[block] + own
        shares[block] += powers[block] * of_everything


@njit(cache=True, nogil=True)
def fewest_blocks(scores, shares, before, target, least, most):
    """How many blocks, the best first, reach a share of the attention mass: [lists] int32, `least` to `most` each.

    scores: [lists, blocks] float32, by which blocks are taken; -inf where one may not be. shares: [lists, blocks]
    float32, and before [lists], as from `estimated_shares`. target: the share to be reached.
    """
    lists, blocks = scores.shape
    counts, keys = np.empty(lists, np.int32), np.empty(blocks, np.uint32)
    for each in range(lists):
        order(scores[each], keys)
        there = number_above(keys, LOWEST)
        wanted = np.float32(target - np.float64(before[each]))
        count = np.int64(0)
        if wanted > 0:
            # The highest score from which on blocks reach it, found bit by bit as `top_k.select` finds its own.
            found = np.uint32(0)
            for bit in range(32):
                tried = found | (SIGN >> np.uint32(bit))
                if share_from(keys, shares[each], tried) >= wanted:
                    found = tried
            if found <= LOWEST:
                count = there
            else:
                reached = share_from(keys, shares[each], found + np.uint32(1))
                count = number_above(keys, found)
                for block in range(blocks):
                    if reached >= wanted:
                        break
                    if keys[block] == found:
                        reached += shares[each, block]
                        count += 1
        counts[each] = min(max(count, least), min(there, most))
    return counts


@inner(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def share_from(keys, shares, lowest):
    """What the shares [n] float32 are together of blocks whose keys [n] uint32 are `lowest` or more."""
    found = np.float32(0)
    for block in range(keys.size):
        found += shares[block] if keys[block] >= lowest else np.float32(0)
    return found


@inner(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _sum_of_powers(scores, most):
    """Σ exp(score - most) of [n] float32."""
    total = np.float32(0)
    for each in range(scores.size):
        total += exp2((scores[each] - most) * LOG2_E)
    return total


@inner(error_model="numpy")
def log_sum_exp(scores):
    """log Σ exp(score) of [n] float32; -inf where there is none."""
    most = row_max(scores.reshape(1, scores.size), 0, scores.size)
    return most if most == -np.inf else most + np.log(_sum_of_powers(scores, most))


@inner(error_model="numpy")
def logaddexp(first, second):
    """log(exp(first) + exp(second)) of float32; -inf where both are."""
    most, least = max(first, second), min(first, second)
    if least == -np.inf:
        return most
    return most + np.log2(np.float32(1) + exp2((least - most) * LOG2_E)) * LN_2


@njit(types.float64(_LSE, _LSE), cache=True, nogil=True, error_model="numpy")
def covered_share(attended, total):
    """The mean over query heads of what share `attended` is of `total`, log-sum-exps [rows, kv_heads, group] float32.

    NaN where one of them is.
    """
    sum_of_shares = 0.0
    for row in range(total.shape[0]):
        for head in range(total.shape[1]):
            for query in range(total.shape[2]):
                sum_of_shares += np.exp(attended[row, head, query] - total[row, head, query])
    return sum_of_shares / total.size


@njit(cache=True, nogil=True)
def take_out(log_masses, positions):
    """Let blocks at positions [rows, 1 or kv_heads, n] have the mass 0; positions below 0 are none."""
    rows, kv_heads, group, _ = log_masses.shape
    lists = positions.shape[1]
    for row in range(rows):
        for head in range(kv_heads):
            for place in range(positions.shape[2]):
                position = positions[row, min(head, lists - 1), place]
                if position >= 0:
                    for query in range(group):
                        log_masses[row, head, query, position] = -np.inf
