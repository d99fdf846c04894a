"""The best blocks of each list of scores."""

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.device_function import device_function


def top_k_blocks(scores: np.ndarray, counts: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of the k highest scores of each list, in ascending order of position.

    scores: [lists, n] float32. counts: [lists] int32, entries in use (the first ones of a list). Ties go to the lower
    position; NaN is lower than every score.

    Returns indices [lists, k] int32, padded with -1, and the number of valid ones [lists] int32, min(k, count).
    Raises ValueError if shapes do not fit, k is negative or a count is outside 0..n.
    """
    if scores.ndim != 2 or counts.shape != scores.shape[:1]:
        raise ValueError(f"scores {scores.shape} must be [lists, n] and counts {counts.shape} [lists]")
    if k < 0:
        raise ValueError(f"k is {k}; it must be at least 0")
    if counts.size and not (counts.min() >= 0 and counts.max() <= scores.shape[1]):
        raise ValueError(f"counts range over {counts.min()}..{counts.max()}; lists hold 0..{scores.shape[1]} scores")
    indices = np.full((scores.shape[0], k), -1, np.int32)
    taken = np.minimum(counts, k).astype(np.int32)
    select(np.ascontiguousarray(scores, np.float32), np.ascontiguousarray(counts, np.int32), taken, indices)
    return indices, taken


SIGN, LOWEST = np.uint32(1 << 31), np.uint32(0x007FFFFF)
"""The sign bit of a float, and the sort key of -inf and NaN."""


@device_function
def order(scores, keys):
    """Write sort keys [n] uint32, ordered as the scores [n] float32; NaN is equal to -inf, and -0 to 0."""
    bits = scores.view(np.uint32)
    for i in range(scores.size):
        if np.isnan(scores[i]):
            keys[i] = LOWEST
        elif scores[i] == 0:
            keys[i] = SIGN
        else:
            keys[i] = ~bits[i] if bits[i] & SIGN else bits[i] | SIGN


@device_function
def number_above(keys, lowest):
    """Returns how many of keys [n] uint32 are above `lowest`."""
    # Numba widens shifted numbers to 64 bits; keys compare fastest with 32.
    found, least = np.int32(0), np.uint32(lowest)
    for i in range(keys.size):
        found += np.int32(keys[i] > least)
    return found


@device_function
def _kth_largest(keys, k):
    """Returns the k-th largest of keys [n] uint32, searched bit by bit from the highest; each pass is vectorised."""
    found = np.uint32(0)
    for bit in range(32):
        # Numba widens shifted numbers to 64 bits; keys compare fastest with 32.
        tried, above = np.uint32(found | (SIGN >> np.uint32(bit))), np.int32(0)
        for i in range(keys.size):
            above += np.int32(keys[i] >= tried)
        if above >= k:
            found = tried
    return found


@njit(cache=True, nogil=True)
def select(scores, counts, taken, indices):
    """Write the positions of the `taken[i]` highest of the first `counts[i]` scores of list i to `indices[i]`."""
    keys = np.empty(scores.shape[1], np.uint32)
    for row in range(scores.shape[0]):
        count, needed = counts[row], taken[row]
        if needed == 0:
            continue
        of_row, ordered = scores[row, :count], keys[:count]
        order(of_row, ordered)
        threshold = _kth_largest(ordered, needed)
        above, nans_needed = 0, 0
        for i in range(count):
            above += ordered[i] > threshold
        ties = needed - above
        # NaN has the sort key of -inf, but a score of -inf is taken before any NaN.
        if threshold == LOWEST:
            real = 0
            for i in range(count):
                real += ordered[i] == threshold and not np.isnan(of_row[i])
            nans_needed = max(0, ties - real)
            ties -= nans_needed
        place = 0
        for i in range(count):
            if ordered[i] > threshold:
                take = True
            elif np.isnan(of_row[i]):
                take = nans_needed > 0
                nans_needed -= take
            else:
                take = ordered[i] == threshold and ties > 0
                ties -= take
            if take:
                indices[row, place] = i
                place += 1
