"""From scores of blocks to the blocks that a step attends to."""

import numpy as np
from numba import njit

from cpu_ops.top_k import select


@njit(cache=True, nogil=True)
def best_blocks(scores, count, allowed, shared, largest):
    """Positions of the `count` best blocks, ascending; ties go to the lower position.

    scores: [rows, kv_heads, group, blocks] float32. A kv head's score is the mean over its group, or the maximum where
    `largest`; where `shared`, all kv heads are summed and choose together. allowed: [rows, 1 where shared, else
    kv_heads, n] int32, positions that may be chosen, at least `count`; all where n is 0.

    Returns [rows, 1 where shared, else kv_heads, count] int32.
    """
    rows, kv_heads, group, blocks = scores.shape
    lists = 1 if shared else kv_heads
    reduced = np.zeros((rows * lists, blocks), np.float32)
    head_scores = np.empty(blocks, np.float32)
    for row in range(rows):
        for head in range(kv_heads):
            for block in range(blocks):
                head_scores[block] = scores[row, head, 0, block]
            for query in range(1, group):
                for block in range(blocks):
                    score = scores[row, head, query, block]
                    if not largest:
                        head_scores[block] += score
                    elif score > head_scores[block] or np.isnan(score):
                        head_scores[block] = score
            if not largest:
                for block in range(blocks):
                    head_scores[block] /= np.float32(group)
            target = row if shared else row * kv_heads + head
            for block in range(blocks):
                reduced[target, block] += head_scores[block]
    if allowed.shape[2] > 0:
        _forbid_others(reduced, allowed)
    positions = np.empty((rows * lists, count), np.int32)
    select(reduced, np.full(rows * lists, blocks, np.int32), np.full(rows * lists, count, np.int32), positions)
    return positions.reshape(rows, lists, count)


@njit
def _forbid_others(reduced, allowed):
    """Let every score [rows * lists, blocks] be -inf whose position is not among allowed [rows, lists, n]."""
    rows, lists, n = allowed.shape
    for row in range(rows):
        for each in range(lists):
            scores = reduced[row * lists + each]
            before = scores.copy()
            scores[:] = -np.inf
            for place in range(n):
                position = allowed[row, each, place]
                scores[position] = before[position]


@njit(cache=True, nogil=True)
def attended_ids(table, positions, first, end):
    """The blocks before `first`, those at `positions` of the blocks [first, end), and those from `end` on.

    table: [rows, blocks] int32 ids. positions: [rows, lists, count] int32.

    Returns [rows, lists, first + count + blocks - end] int32.
    """
    rows, blocks = table.shape
    lists, count = positions.shape[1:]
    ids = np.empty((rows, lists, first + count + blocks - end), np.int32)
    for row in range(rows):
        for each in range(lists):
            for block in range(first):
                ids[row, each, block] = table[row, block]
            for place in range(count):
                ids[row, each, first + place] = table[row, first + positions[row, each, place]]
            for block in range(end, blocks):
                ids[row, each, first + count + block - end] = table[row, block]
    return ids
