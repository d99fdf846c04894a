"""Device functions that convert, list and merge arrays between the kernel calls of `estimating_kernel`."""

import numpy as np

from hetero_kv.cpu_ops.bfloat16_bits import number, rounded
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.estimated_masses import logaddexp
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, tanh


@device_function
def as_rows_of_heads(array):
    """Returns a step's q, k or v [rows, heads, 1, dim] as float32 [rows, heads, dim]."""
    rows, heads, _, dim = array.shape
    found = np.empty((rows, heads, dim), np.float32)
    for row in range(rows):
        for head in range(heads):
            for d in range(dim):
                found[row, head, d] = number(array[row, head, 0, d])
    return found


@device_function
def write_numbers(numbers, out):
    """Write float32 [rows, heads, dim] to a step's out [rows, heads, 1, dim], of q's type."""
    for row in range(numbers.shape[0]):
        for head in range(numbers.shape[1]):
            for d in range(numbers.shape[2]):
                out[row, head, 0, d] = rounded(out, numbers[row, head, d])


@device_function
def copy_into(source, place):
    """Copy a three-dimensional array to `place`, of the same shape.

    For an array assignment Numba compiles the shape error into every kernel, which takes seconds.
    """
    for first in range(source.shape[0]):
        for second in range(source.shape[1]):
            for third in range(source.shape[2]):
                place[first, second, third] = source[first, second, third]


@device_function
def by_head(pool):
    """Returns a view of [num_blocks, kv_heads, n, dim] as [num_blocks * kv_heads, 1, n, dim]."""
    return pool.reshape(pool.shape[0] * pool.shape[1], 1, pool.shape[2], pool.shape[3])


@device_function
def head_rows(scores):
    """Returns a view of [rows, kv_heads, group, n] as [rows * kv_heads, 1, group, n]."""
    return scores.reshape(scores.shape[0] * scores.shape[1], 1, scores.shape[2], scores.shape[3])


@device_function
def head_row(sums):
    """Returns a view of [rows, kv_heads, group] as [rows * kv_heads, 1, group]."""
    return sums.reshape(sums.shape[0] * sums.shape[1], 1, sums.shape[2])


@device_function
def scale_and_cap(scores, scale, softcap):
    """Scale and soft-cap scores in place: softcap * tanh(scale * score / softcap), or scale * score if softcap is 0."""
    flat = scores.reshape(scores.size)
    for each in range(flat.size):
        score = flat[each] * scale
        flat[each] = softcap * tanh(score / softcap) if softcap > 0 else score


@device_function
def attended_lists(table, context, positions, first, end):
    """Returns ids of the blocks of `table` outside [first, end), then of `context` at positions, and their numbers.

    positions: [rows, lists, n] int32, negative for padding. Returns ids [rows, lists, table size - (end - first) + n]
    int32 and counts [rows, lists] int32, the entries in use.
    """
    rows, lists, count = positions.shape
    around = first + table.shape[1] - end
    ids, counts = np.empty((rows, lists, around + count), np.int32), np.full((rows, lists), around, np.int32)
    for row in range(rows):
        for each in range(lists):
            for block in range(first):
                ids[row, each, block] = table[row, block]
            for block in range(end, table.shape[1]):
                ids[row, each, first + block - end] = table[row, block]
            for place in range(count):
                if positions[row, each, place] >= 0:
                    ids[row, each, counts[row, each]] = context[row, positions[row, each, place]]
                    counts[row, each] += 1
    return ids, counts


@device_function
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
