"""Divides lists of blocks among threads by tokens, and merges partial results of shared lists."""

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, exp2

BAD_ID, BAD_COUNT, BAD_LENGTH = -1, -2, -3
_INTEGER = types.int64
_REAL4, _REAL3, _REAL2 = (types.Array(types.float32, dims, "C") for dims in (4, 3, 2))
_PART = types.Array(types.float32, 2, "A")


@device_function
def list_starts(block_ids, block_counts, block_lengths, kv_heads, block_size):
    """Returns the first token of each (row, kv head) list, counted over all lists; a first entry < 0 is an error."""
    rows, lists_per_row, max_blocks = block_ids.shape
    starts = np.zeros(rows * kv_heads + 1, np.int64)
    for row in range(rows):
        tokens = np.int64(0)
        for head in range(kv_heads):
            if head < lists_per_row:
                tokens = np.int64(0)
                count = block_counts[row, head]
                if count < 0 or count > max_blocks:
                    starts[0] = BAD_COUNT
                    return starts
                for entry in range(count):
                    block = block_ids[row, head, entry]
                    if block < 0 or block >= block_lengths.shape[0]:
                        starts[0] = BAD_ID
                        return starts
                    if block_lengths[block] < 0 or block_lengths[block] > block_size:
                        starts[0] = BAD_LENGTH
                        return starts
                    tokens += block_lengths[block]
            index = row * kv_heads + head
            starts[index + 1] = starts[index] + tokens
    return starts


@device_function
def own_entries(ids, count, block_lengths, position, first, last):
    """Returns the first of a list's blocks that begin among a thread's tokens, the end of these, and its position.

    ids: of the list's blocks, of which `count` are in use. position: of the list's first token. first, last: the range
    of the thread's tokens; all positions count the tokens of all lists.
    """
    entry = np.int64(0)
    while entry < count and position < first:
        position += block_lengths[ids[entry]]
        entry += 1
    end, behind = entry, position
    while end < count and behind < last:
        behind += block_lengths[ids[end]]
        end += 1
    return entry, end, position


@device_function
def token_starts(counts, kv_heads):
    """As `list_starts`, for lists of single tokens; counts: [rows, 1 or kv_heads], their lengths."""
    starts = np.zeros(counts.shape[0] * kv_heads + 1, np.int64)
    for index in range(starts.size - 1):
        starts[index + 1] = starts[index] + counts[index // kv_heads, min(index % kv_heads, counts.shape[1] - 1)]
    return starts


@device_function
def edge_buffers(threads, queries, v_dim):
    """Returns buffers for the partial results of shared lists: edges, edge_sums, edge_most, edge_total.

    Each thread has two edges. edges: [2 * threads] int64, each edge's list, -1 for an unused edge.
    """
    count = 2 * threads
    sums = np.empty((count, queries, v_dim), np.float32)
    most, total = np.empty((count, queries), np.float32), np.empty((count, queries), np.float32)
    return np.full(count, -1, np.int64), sums, most, total


# With a signature, for the same reason as `scratch`.
@njit(
    types.none(
        _INTEGER, _INTEGER, types.boolean, _INTEGER, _INTEGER, _PART, _PART, _REAL2, types.Array(_INTEGER, 1, "C"),
        _REAL3, _REAL2, _REAL2, _REAL4, _REAL3,
    ),
    cache=True, nogil=True, error_model="numpy",
)  # fmt: skip
def keep_part(
    index, edge, whole, tile_queries, row_size, most, totals, sums, edges, edge_sums, edge_most, edge_total, out, lse
):  # fmt: skip
    """Write a thread's result for list `index` to out and lse if it had the `whole` list, else to its edge `edge`.

    most, totals: [tiles, lanes], each tile's largest scores (base 2) and sums of weights 2 ** (score - most); every
    `row_size`-th lane belongs to the same query. sums: [group, v_dim] or more, values summed by these weights.
    """
    kv_heads, group, v_dim, lanes = out.shape[1], out.shape[2], out.shape[3], most.shape[1]
    row, head = index // kv_heads, index % kv_heads
    for g in range(group):
        tile, lane = g // tile_queries, g % tile_queries
        weight = np.float32(0)
        for same in range(lane, lanes, row_size):
            weight += totals[tile, same]
        if whole:
            lse[row, head, g] = (most[tile, lane] + np.log2(weight)) * LN_2
            for d in range(v_dim):
                out[row, head, g, d] = sums[g, d] / weight
        else:
            edges[edge] = index
            edge_most[edge, g], edge_total[edge, g] = most[tile, lane], weight
            for d in range(v_dim):
                edge_sums[edge, g, d] = sums[g, d]


@device_function(error_model="numpy")
def merge_edges(edges, edge_sums, edge_most, edge_total, out, lse):
    """Merge partial results of shared lists into out and lse.

    edges and the others: from `edge_buffers`; edges of one list are consecutive apart from unused ones.
    """
    group, v_dim = edge_sums.shape[1:]
    kv_heads = out.shape[1]
    first = 0
    while first < edges.size:
        index, stop = edges[first], first + 1
        while stop < edges.size and (edges[stop] == index or edges[stop] < 0):
            stop += 1
        if index >= 0:
            row, head = index // kv_heads, index % kv_heads
            for g in range(group):
                most, total = np.float32(-np.inf), np.float32(0)
                for d in range(v_dim):
                    out[row, head, g, d] = 0
                for edge in range(first, stop):
                    if edges[edge] == index:
                        most = max(most, edge_most[edge, g])
                for edge in range(first, stop):
                    if edges[edge] == index:
                        weight = exp2(edge_most[edge, g] - most)
                        total += weight * edge_total[edge, g]
                        for d in range(v_dim):
                            out[row, head, g, d] += weight * edge_sums[edge, g, d]
                for d in range(v_dim):
                    out[row, head, g, d] /= total
                lse[row, head, g] = (most + np.log2(total)) * LN_2
        first = stop
