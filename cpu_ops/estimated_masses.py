"""What share of the attention each block of a context is estimated to receive, and how few blocks reach a share."""

import numpy as np
from numba import njit

from cpu_ops.exponential import LN_2, LOG2_E, exp2


@njit(cache=True, nogil=True)
def estimated_shares(log_masses, beside, shared):
    """Shares of the attention mass, the means over the query heads that choose together.

    log_masses: [rows, kv_heads, group, blocks] float32, the estimated log-sum-exp of each block's scores. beside:
    [rows, kv_heads, group] float32, the log-sum-exp of what is attended to in any case; -inf where that is nothing.
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
                if total == -np.inf:
                    continue
                before[target] += weight * exp2((beside[row, head, query] - total) * LOG2_E)
                for block in range(blocks):
                    shares[target, block] += weight * exp2((masses[block] - total) * LOG2_E)
    return shares, before


@njit(cache=True, nogil=True, fastmath={"contract", "nsz"}, error_model="numpy")
def spread_masses(means, likely, block_size):
    """The log-sum-exp of each block's scores, from their mean and the score one standard deviation above.

    Of n = `block_size` scores that are spread normally by σ around a mean m: m + log n + σ²/2, as far as so few scores
    can follow that, which is to σ² = 2 log n; then m + σ sqrt(2 log n), their largest (the random energy model's free
    energy, Derrida 1981, Phys. Rev. B 24, 2613).

    means, likely: [rows, kv_heads, group, blocks] float32. Returns an array like these.
    """
    masses = np.empty_like(means)
    log_n = np.float32(np.log(block_size))
    most = np.sqrt(np.float32(2) * log_n)
    for row in range(means.shape[0]):
        for head in range(means.shape[1]):
            for query in range(means.shape[2]):
                for block in range(means.shape[3]):
                    mean = means[row, head, query, block]
                    deviation = likely[row, head, query, block] - mean
                    follows = deviation < most
                    above = log_n + np.float32(0.5) * deviation * deviation if follows else deviation * most
                    masses[row, head, query, block] = mean + above
    return masses


@njit(cache=True, nogil=True)
def fewest_blocks(scores, shares, before, target, least, most):
    """How many blocks, the best first, reach a share of the attention mass: [lists] int32, `least` to `most` each.

    scores: [lists, blocks] float32, by which blocks are taken; -inf where one may not be. shares: [lists, blocks]
    float32, and before [lists], as from `estimated_shares`. target: the share to be reached.
    """
    lists, blocks = scores.shape
    counts = np.empty(lists, np.int32)
    for each in range(lists):
        order = np.argsort(-scores[each], kind="mergesort")
        reached, count = np.float64(before[each]), 0
        while count < min(most, blocks) and (reached < target or count < least):
            if scores[each, order[count]] == -np.inf:
                break
            reached += shares[each, order[count]]
            count += 1
        counts[each] = count
    return counts


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def log_sum_exp(scores):
    """log Σ exp(score) of [n] float32; -inf where there is none."""
    most = np.float32(-np.inf)
    for each in range(scores.size):
        most = max(most, scores[each])
    if most == -np.inf:
        return most
    total = np.float64(0)
    for each in range(scores.size):
        total += exp2((scores[each] - most) * LOG2_E)
    return np.float32(most + np.log(total))


@njit(error_model="numpy")
def logaddexp(first, second):
    """log(exp(first) + exp(second)) of float32; -inf where both are."""
    most, least = max(first, second), min(first, second)
    if least == -np.inf:
        return most
    return most + np.log2(np.float32(1) + exp2((least - most) * LOG2_E)) * LN_2


@njit(cache=True, nogil=True)
def add_rest(log_masses, attended, total):
    """Write the log-sum-exp of what is attended to and of log_masses [rows, kv_heads, group, blocks] to `total`."""
    rows, kv_heads, group = attended.shape
    for row in range(rows):
        for head in range(kv_heads):
            for query in range(group):
                rest = log_sum_exp(log_masses[row, head, query])
                total[row, head, query] = logaddexp(rest, attended[row, head, query])


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


@njit(cache=True, nogil=True)
def put(target, positions, source):
    """Copy the entries of blocks at positions [rows, 1 or kv_heads, n]; positions below 0 are none.

    target, source: [rows, kv_heads, group, blocks] float32.
    """
    rows, kv_heads, group, _ = target.shape
    lists = positions.shape[1]
    for row in range(rows):
        for head in range(kv_heads):
            for place in range(positions.shape[2]):
                position = positions[row, min(head, lists - 1), place]
                if position >= 0:
                    for query in range(group):
                        target[row, head, query, position] = source[row, head, query, position]
