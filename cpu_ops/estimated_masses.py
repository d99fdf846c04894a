"""What share of the attention each block of a context is estimated to receive, and how few blocks reach a share."""

import numpy as np
from numba import njit, types

from cpu_ops.exponential import LN_2, LOG2_E, exp2, row_max
from cpu_ops.top_k import select

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


@njit(cache=True, nogil=True)
def fewest_blocks(scores, shares, before, target, least, most):
    """How many blocks, the best first, reach a share of the attention mass: [lists] int32, `least` to `most` each.

    scores: [lists, blocks] float32, by which blocks are taken; -inf where one may not be. shares: [lists, blocks]
    float32, and before [lists], as from `estimated_shares`. target: the share to be reached.
    """
    lists, blocks = scores.shape
    most = min(most, blocks)
    counts = np.empty(lists, np.int32)
    best = np.empty((lists, most), np.int32)
    select(scores, np.full(lists, blocks, np.int32), np.full(lists, most, np.int32), best)
    for each in range(lists):
        order = best[each][np.argsort(-scores[each][best[each]], kind="mergesort")]
        reached, count = np.float64(before[each]), 0
        while count < most and (reached < target or count < least) and scores[each, order[count]] > -np.inf:
            reached += shares[each, order[count]]
            count += 1
        counts[each] = count
    return counts


@njit(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _sum_of_powers(scores, most):
    """Σ exp(score - most) of [n] float32."""
    total = np.float32(0)
    for each in range(scores.size):
        total += exp2((scores[each] - most) * LOG2_E)
    return total


@njit(error_model="numpy")
def log_sum_exp(scores):
    """log Σ exp(score) of [n] float32; -inf where there is none."""
    most = row_max(scores.reshape(1, scores.size), 0, scores.size)
    return most if most == -np.inf else most + np.log(_sum_of_powers(scores, most))


@njit(error_model="numpy")
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
