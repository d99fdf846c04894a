"""Groups of consecutive blocks of a Context: blocks of opened groups are scored one by one, other groups as a whole."""

import numpy as np

from hetero_kv.cpu_ops.device_function import kernel_part
from hetero_kv.cpu_ops.estimated_masses import log_sum_exp


@kernel_part
def group_ids(context, size, groups):
    """Returns the ids of the last block of each group of `size` blocks, where its representative is stored.

    context: [rows, blocks] int32 ids. Blocks after the last group belong to no group.

    Returns [rows, groups] int32.
    """
    rows = len(context)
    ids = np.empty((rows, groups), np.int32)
    for row in range(rows):
        for group in range(groups):
            ids[row, group] = context[row, (group + 1) * size - 1]
    return ids


@kernel_part
def groups_of(positions, size, groups, opened):
    """Write the groups that contain any of positions [rows, lists, n] to opened [rows, lists, most].

    Groups ascend and are padded with -1. Negative positions are padding. Positions after the last group are in none.
    """
    rows, lists, _ = positions.shape
    opened[:] = -1
    for row in range(rows):
        for each in range(lists):
            holds = np.zeros(groups, np.bool_)
            for position in positions[row, each]:
                if position >= 0 and position // size < groups:
                    holds[position // size] = True
            place = 0
            for group in range(groups):
                if holds[group]:
                    opened[row, each, place] = group
                    place += 1


@kernel_part
def opened_entries(opened, size, groups, counts):
    """Returns the positions of the blocks of opened groups and of those in no group.

    opened: [rows, lists, most] int32, ascending, padded with -1. groups: their number; 0 if every block is scored.
    counts: [rows], each row's blocks.

    Returns [rows, lists, entries] int32, padded with -1.
    """
    rows, lists, most = opened.shape
    blocks = counts.max()
    entries = np.full((rows, lists, most * size + blocks - groups * size), -1, np.int32)
    for row in range(rows):
        for each in range(lists):
            place = 0
            for group in opened[row, each]:
                if group >= 0:
                    for block in range(group * size, (group + 1) * size):
                        entries[row, each, place] = block
                        place += 1
            for block in range(groups * size, counts[row]):
                entries[row, each, place] = block
                place += 1
    return entries


@kernel_part
def entry_ids(context, entries, kv_heads):
    """Returns the index of each entry in arrays with one row per block and kv head: [rows * kv_heads, entries] int32.

    A padding entry gets index 0, which is always valid.
    """
    rows, lists, count = entries.shape
    ids = np.zeros((rows * kv_heads, count), np.int32)
    for row in range(rows):
        for head in range(kv_heads):
            own = entries[row, min(head, lists - 1)]
            for place in range(count):
                if own[place] >= 0:
                    ids[row * kv_heads + head, place] = context[row, own[place]] * kv_heads + head
    return ids


@kernel_part
def forget_missing(scores, entries):
    """Set scores [rows, kv_heads, group, entries or 0] of padding entries to -inf."""
    lists, count = entries.shape[1], scores.shape[3]
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            own = entries[row, min(head, lists - 1)]
            for query in range(scores.shape[2]):
                for place in range(count):
                    if own[place] < 0:
                        scores[row, head, query, place] = -np.inf


@kernel_part
def places_of(positions, entries):
    """Returns the indices of positions [rows, lists, n] in the ascending entries [rows, lists, entries], or -1."""
    found = np.full(positions.shape, -1, np.int32)
    for row in range(positions.shape[0]):
        for each in range(positions.shape[1]):
            own = entries[row, each]
            count = 0
            while count < own.size and own[count] >= 0:
                count += 1
            for place in range(positions.shape[2]):
                position = positions[row, each, place]
                at = np.searchsorted(own[:count], position)
                if position >= 0 and at < count and own[at] == position:
                    found[row, each, place] = at
    return found


@kernel_part
def positions_at(places, entries, positions):
    """Write the entries at `places` to positions [rows, lists, n]; a place of -1 gives -1."""
    for row in range(places.shape[0]):
        for each in range(places.shape[1]):
            for index in range(places.shape[2]):
                place = places[row, each, index]
                positions[row, each, index] = entries[row, each, place] if place >= 0 else -1


@kernel_part
def for_every_head(places, kv_heads):
    """Returns places [rows, lists, n] repeated for each kv head: [rows * kv_heads, 1, n]."""
    rows, lists, count = places.shape
    found = np.empty((rows * kv_heads, 1, count), np.int32)
    for row in range(rows):
        for head in range(kv_heads):
            # An element loop: for an array assignment Numba also compiles the shape error, which takes six seconds.
            for place in range(count):
                found[row * kv_heads + head, 0, place] = places[row, min(head, lists - 1), place]
    return found


@kernel_part
def masses_of(log_masses):
    """Returns the log-sum-exp of [rows, kv_heads, group, n] over n: [rows, kv_heads, group] float32."""
    rows, kv_heads, group, count = log_masses.shape
    found = np.full((rows, kv_heads, group), -np.inf, np.float32)
    for row in range(rows if count > 0 else 0):
        for head in range(kv_heads):
            for query in range(group):
                found[row, head, query] = log_sum_exp(log_masses[row, head, query])
    return found


@kernel_part
def numbers_into(taken, column, positions):
    """Write each row's number of positions [rows, lists, n] that are not padding to a column of taken [rows, columns].

    Returns the sum over rows.
    """
    total = 0
    for row in range(len(positions)):
        found = 0
        for each in range(positions.shape[1]):
            for place in range(positions.shape[2]):
                found += positions[row, each, place] >= 0
        taken[row, column] = found
        total += found
    return total
