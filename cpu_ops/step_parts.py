"""Device functions that convert, list and merge arrays between the stages of `retrieval_kernel`."""

import numpy as np

from hetero_kv.cpu_ops.bfloat16_bits import number, rounded
from hetero_kv.cpu_ops.device_function import device_function, kernel_part
from hetero_kv.cpu_ops.estimated_masses import logaddexp
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, tanh


@kernel_part
def as_rows_of_heads(array):
    """Returns a step's q, k or v [rows, heads, 1, dim] as float32 [rows, heads, dim]."""
    rows, heads, _, dim = array.shape
    found = np.empty((rows, heads, dim), np.float32)
    for row in range(rows):
        for head in range(heads):
            for d in range(dim):
                found[row, head, d] = number(array[row, head, 0, d])
    return found


@kernel_part
def write_numbers(numbers, out):
    """Write float32 [rows, heads, dim] to a step's out [rows, heads, 1, dim], of q's type."""
    for row in range(numbers.shape[0]):
        for head in range(numbers.shape[1]):
            for d in range(numbers.shape[2]):
                out[row, head, 0, d] = rounded(out, numbers[row, head, d])


@kernel_part
def copy_into(source, place):
    """Copy a three-dimensional array to `place`, of the same shape.

    For an array assignment Numba compiles the shape error into every kernel, which takes seconds.
    """
    for first in range(source.shape[0]):
        for second in range(source.shape[1]):
            for third in range(source.shape[2]):
                place[first, second, third] = source[first, second, third]


@kernel_part
def by_head(pool):
    """Returns a view of [num_blocks, kv_heads, n, dim] as [num_blocks * kv_heads, 1, n, dim]."""
    return pool.reshape(pool.shape[0] * pool.shape[1], 1, pool.shape[2], pool.shape[3])


@kernel_part
def head_rows(scores):
    """Returns a view of [rows, kv_heads, group, n] as [rows * kv_heads, 1, group, n]."""
    return scores.reshape(scores.shape[0] * scores.shape[1], 1, scores.shape[2], scores.shape[3])


@kernel_part
def head_row(sums):
    """Returns a view of [rows, kv_heads, group] as [rows * kv_heads, 1, group]."""
    return sums.reshape(sums.shape[0] * sums.shape[1], 1, sums.shape[2])


@kernel_part
def scale_and_cap(scores, scale, softcap):
    """Scale and soft-cap scores in place: softcap * tanh(scale * score / softcap), or scale * score if softcap is 0."""
    flat = scores.reshape(scores.size)
    for each in range(flat.size):
        score = flat[each] * scale
        flat[each] = softcap * tanh(score / softcap) if softcap > 0 else score


@kernel_part
def has_token(ranges):
    """Returns whether any row of `ranges` (as in `RetrievalStep`) has a token to store."""
    found = False
    for row in range(ranges.shape[1]):
        found |= ranges[0, row] >= 0
    return found


@kernel_part
def are_ranges(firsts, ends, used):
    """Returns whether each row's Context [first, end) lies among its blocks; used: their numbers [rows, 1]."""
    wrong = False
    for row in range(len(firsts)):
        wrong |= firsts[row] < 0 or ends[row] < firsts[row] or ends[row] > used[row, 0]
    return not wrong


@kernel_part
def are_drafted(positions, table, used, block_size):
    """Returns whether rows are consecutive tokens of one sequence: the block of one is also the next one's.

    positions: [rows], of the new tokens, negative without one. used: [rows, 1], blocks of each row of the table.
    """
    for row in range(len(table) - 1):
        block = positions[row] // block_size
        if positions[row] >= 0 and block < used[row + 1, 0] and table[row, block] == table[row + 1, block]:
            return True
    return False


@kernel_part
def end_of_draft(positions, table, used, block_size, start):
    """Returns the end of the rows from `start` on that are consecutive tokens of one sequence, as in `are_drafted`."""
    stop = start + 1
    while stop < len(table):
        block = positions[stop - 1] // block_size
        if positions[stop - 1] < 0 or block >= used[stop, 0] or table[stop - 1, block] != table[stop, block]:
            break
        stop += 1
    return stop


@kernel_part
def show_up_to(position, ids, lengths, block_size):
    """Make the block of the token at `position`, among ids [blocks], end with that token."""
    if position >= 0:
        lengths[ids[position // block_size]] = position % block_size + 1


@kernel_part
def end_of_run(firsts, ends, start, are_alike):
    """Returns the end of the run of rows from `start` on that choose together.

    Their Contexts [first, end) have equally many blocks; or, unless `are_alike`, numbers of blocks of which the
    smallest is at least 7/8 of the largest: what is computed for missing blocks costs less than a run of its own.
    """
    least = most = ends[start] - firsts[start]
    stop = start + 1
    while stop < len(firsts):
        blocks = ends[stop] - firsts[stop]
        least, most = min(least, blocks), max(most, blocks)
        if least < most and (are_alike or 8 * least < 7 * most):
            break
        stop += 1
    return stop


@kernel_part
def contexts(table, firsts, ends):
    """Returns the ids of each row's Context, [rows, n] int32 padded with -1, and their numbers [rows] int32."""
    counts, widest = np.empty(len(table), np.int32), 0
    for row in range(len(table)):
        counts[row] = ends[row] - firsts[row]
        widest = max(widest, counts[row])
    ids = np.full((len(table), widest), -1, np.int32)
    for row in range(len(table)):
        for entry in range(counts[row]):
            ids[row, entry] = table[row, firsts[row] + entry]
    return ids, counts


@kernel_part
def forget_behind(positions, counts):
    """Replace positions [rows, lists, n] that are not below their row's count by -1."""
    for row in range(positions.shape[0]):
        for each in range(positions.shape[1]):
            for place in range(positions.shape[2]):
                if positions[row, each, place] >= counts[row]:
                    positions[row, each, place] = -1


@kernel_part
def sums_of_powers(first, second):
    """Returns log(exp(first) + exp(second)) of two arrays [rows, kv_heads, group]."""
    found = np.empty_like(first)
    for row in range(first.shape[0]):
        for head in range(first.shape[1]):
            for g in range(first.shape[2]):
                found[row, head, g] = logaddexp(first[row, head, g], second[row, head, g])
    return found


@device_function(error_model="numpy")
def merge_into(out, lse, other, other_lse):
    """Merge attention `other` into `out`, both [rows, kv_heads, group, v_dim], by their log-sum-exps; updates lse."""
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
