"""Chooses the blocks that a decode step attends to from scores of blocks."""

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, row_exp2
from hetero_kv.cpu_ops.row_maximum import row_max
from hetero_kv.cpu_ops.top_k import select

MEAN, LARGEST, SOFTMAX, LARGEST_SOFTMAX = 0, 1, 2, 3
"""A kv head's score of a block: the mean or the maximum of its group's scores, or of their softmax over the blocks."""


@njit(cache=True, nogil=True)
def best_blocks(scores, count, candidates, shared, reduce):
    """Returns the positions of the `count` best blocks, ascending; ties go to the lower position.

    scores: [rows, kv_heads, group, blocks] float32, reduced by `reduced_scores`. candidates: [rows, 1 if shared, else
    kv_heads, blocks] int32, the positions that were scored, ascending; [..., 0] if these are 0, 1, 2, ...

    Returns [rows, 1 if shared, else kv_heads, count] int32.
    """
    rows, kv_heads = scores.shape[:2]
    lists = 1 if shared else kv_heads
    reduced = reduced_scores(scores, shared, reduce)
    found = np.full((rows * lists, count), -1, np.int32)
    blocks = np.full(rows * lists, scores.shape[3], np.int32)
    select(reduced, blocks, np.full(rows * lists, count, np.int32), found)
    positions = found.reshape(rows, lists, count)
    if candidates.shape[2] > 0:
        in_context(positions, candidates)
    return positions


@device_function
def in_context(positions, candidates):
    """Replace indices into candidates [rows, lists, n] by the candidates' positions."""
    for row in range(positions.shape[0]):
        for each in range(positions.shape[1]):
            for place in range(positions.shape[2]):
                positions[row, each, place] = candidates[row, each, positions[row, each, place]]


@device_function
def reduced_scores(scores, shared, reduce):
    """Reduces scores [rows, kv_heads, group, blocks] float32 of query heads to one score per block and list.

    reduce: how the scores of a kv head's group are combined: MEAN, LARGEST, SOFTMAX (the mean of each query head's
    softmax over the blocks) or LARGEST_SOFTMAX (their maximum, as in ShadowKV). If `shared`, all kv heads are summed
    and share one list.

    Returns [rows * (1 if shared, else kv_heads), blocks] float32.
    """
    rows, kv_heads, group, blocks = scores.shape
    reduced = np.zeros((rows * (1 if shared else kv_heads), blocks), np.float32)
    head_scores, of_query = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for row in range(rows):
        for head in range(kv_heads):
            for query in range(group):
                for block in range(blocks):
                    of_query[block] = scores[row, head, query, block]
                if reduce >= SOFTMAX:
                    _to_softmax(of_query)
                if query == 0:
                    for block in range(blocks):
                        head_scores[block] = of_query[block]
                elif reduce in (MEAN, SOFTMAX):
                    for block in range(blocks):
                        head_scores[block] += of_query[block]
                else:
                    for block in range(blocks):
                        if of_query[block] > head_scores[block] or np.isnan(of_query[block]):
                            head_scores[block] = of_query[block]
            if reduce in (MEAN, SOFTMAX):
                for block in range(blocks):
                    head_scores[block] /= np.float32(group)
            target = row if shared else row * kv_heads + head
            for block in range(blocks):
                reduced[target, block] += head_scores[block]
    return reduced


@device_function(error_model="numpy")
def _to_softmax(scores):
    """Replace scores [blocks] by their softmax; -inf becomes 0, also where all scores are -inf."""
    row = scores.reshape(1, scores.size)
    most = row_max(row, 0, scores.size)
    if most == -np.inf:
        scores[:] = 0
        return
    for block in range(scores.size):
        scores[block] *= LOG2_E
    total = row_exp2(row, 0, scores.size, most * LOG2_E)
    for block in range(scores.size):
        scores[block] /= total


@device_function
def forbid_others(reduced, allowed):
    """Set every score [rows * lists, blocks] to -inf whose position is not in allowed [rows, lists, n].

    Negative entries of `allowed` are padding.
    """
    rows, lists, n = allowed.shape
    for row in range(rows):
        for each in range(lists):
            scores = reduced[row * lists + each]
            before = scores.copy()
            scores[:] = -np.inf
            for place in range(n):
                position = allowed[row, each, place]
                if position >= 0:
                    scores[position] = before[position]


@njit(cache=True, nogil=True)
def attended_ids(table, positions, firsts, ends):
    """Returns each row's blocks outside its Context and those at `positions` in it, in order, and their numbers.

    table: [rows, blocks] int32 ids, padded with -1. positions: [rows, lists, count] int32, in the Context; negative
    ones are padding. firsts, ends: [rows] int64, the Context's blocks [first, end).

    Returns ids [rows, lists, n] int32 and counts [rows, lists] int32, the entries in use.
    """
    rows, lists, count = positions.shape
    used = blocks_in_use(table)
    around = np.int64(0)
    for row in range(rows):
        around = max(around, firsts[row] + used[row, 0] - ends[row])
    ids, counts = np.empty((rows, lists, around + count), np.int32), np.zeros((rows, lists), np.int32)
    for row in range(rows):
        for each in range(lists):
            place = 0
            for block in range(firsts[row]):
                ids[row, each, place] = table[row, block]
                place += 1
            for at in range(count):
                if positions[row, each, at] >= 0:
                    ids[row, each, place] = table[row, firsts[row] + positions[row, each, at]]
                    place += 1
            for block in range(ends[row], used[row, 0]):
                ids[row, each, place] = table[row, block]
                place += 1
            counts[row, each] = place
    return ids, counts


@device_function
def blocks_in_use(table):
    """Returns the number of each row's blocks in table [rows, blocks], which is padded with -1: [rows, 1] int32."""
    used = np.full((len(table), 1), table.shape[1], np.int32)
    for row in range(len(table)):
        while used[row, 0] > 0 and table[row, used[row, 0] - 1] == -1:
            used[row, 0] -= 1
    return used
