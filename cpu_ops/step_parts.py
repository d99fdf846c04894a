"""What a step that estimates does with its arrays between the calls of other kernels."""

import numpy as np

from cpu_ops.estimated_masses import logaddexp
from cpu_ops.exponential import LOG2_E, exp2, tanh
from cpu_ops.inner import inner
from cpu_ops.number_bits import number


@inner
def numbers_given(given):
    """A step's [rows, heads, 1, dim] as float32 [rows, heads, dim]."""
    rows, heads, _, dim = given.shape
    found = np.empty((rows, heads, dim), np.float32)
    for row in range(rows):
        for head in range(heads):
            for d in range(dim):
                found[row, head, d] = number(given[row, head, 0, d])
    return found


@inner
def copy_into(given, place):
    """Write [n, n', n''] to `place`, of the same shape.

    Of `place[:] = given` Numba compiles, for every kernel anew, the text of the error for shapes that differ: seconds.
    """
    for first in range(given.shape[0]):
        for second in range(given.shape[1]):
            for third in range(given.shape[2]):
                place[first, second, third] = given[first, second, third]


@inner
def by_head(pool):
    """[num_blocks, kv_heads, n, dim] as [num_blocks * kv_heads, 1, n, dim], the same memory."""
    return pool.reshape(pool.shape[0] * pool.shape[1], 1, pool.shape[2], pool.shape[3])


@inner
def head_rows(scores):
    """[rows, kv_heads, group, n] as [rows * kv_heads, 1, group, n], the same memory."""
    return scores.reshape(scores.shape[0] * scores.shape[1], 1, scores.shape[2], scores.shape[3])


@inner
def head_row(sums):
    """[rows, kv_heads, group] as [rows * kv_heads, 1, group], the same memory."""
    return sums.reshape(sums.shape[0] * sums.shape[1], 1, sums.shape[2])


@inner
def scale_and_cap(scores, scale, softcap):
    """Scale and cap scores as attention's are."""
    flat = scores.reshape(scores.size)
    for each in range(flat.size):
        score = flat[each] * scale
        flat[each] = softcap * tanh(score / softcap) if softcap > 0 else score


@inner
def attended_lists(table, context, positions, first, end):
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


@inner
def sums_of_powers(first, second):
    """log(exp(first) + exp(second)) of two [rows, kv_heads, group]."""
    found = np.empty_like(first)
    for row in range(first.shape[0]):
        for head in range(first.shape[1]):
            for g in range(first.shape[2]):
                found[row, head, g] = logaddexp(first[row, head, g], second[row, head, g])
    return found


@inner(error_model="numpy")
def merge_into(out, lse, other, other_lse):
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
