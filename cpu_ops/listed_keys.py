"""Device functions of kernels over runs of keys: a token's address, the next tokens of the runs, causal masking."""

import numpy as np
from numba import njit

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gathered_rows import row_address

MASKED = np.float32(-3e30)
"""Score of a token after the query. It stays finite under any scale, so that nothing becomes infinite."""
LEAST = np.float32(-1e30)
"""Initial maximum: below every score and above `MASKED`, so that unseen tokens get weight 0 before any is seen."""
_ROOM = np.float32(8)


@device_function
def places_of(past, new, row, head):
    """Returns the first address and the pitch in bytes of the past vectors and of the new ones of one row and head.

    The result is the `places` of `address_in`.
    """
    before, own = row_address(past, row, head, 0), row_address(new, row, head, 0)
    pitch, own_pitch = row_address(past, row, head, 1) - before, row_address(new, row, head, 1) - own
    # Shifted so that new tokens are indexed from the first past token.
    return before, pitch, own - past.shape[2] * own_pitch, own_pitch


@njit(nogil=True, inline="always")
def address_in(places, past_count, token):
    """Returns the address of a token's vector; the first `past_count` tokens come before the chunk."""
    before, pitch, own, own_pitch = places
    return before + token * pitch if token < past_count else own + token * own_pitch


@device_function
def next_listed(runs, run, token, stop, listed):
    """Write the next tokens of the runs before `stop` to `listed`, beginning with `token` of `run`, until it is full.

    Returns the run and the token within it at which to continue, and how many tokens were written.
    """
    filled = 0
    while run < stop and filled < listed.size:
        first = np.int64(runs[run, 0]) + token
        count = min(np.int64(runs[run, 1]) - first, listed.size - filled)
        for t in range(count):
            listed[filled + t] = first + t
        filled += count
        token += count
        if first + count == runs[run, 1]:
            run += 1
            token = np.int64(0)
    return run, token, filled


@device_function
def mask_future(listed, filled, position, scores):
    """Mask scores [tokens, queries] of tokens after a query; the first query is at `position`."""
    for t in range(filled):
        for i in range(min(scores.shape[1], listed[t] - position)):
            scores[t, i] = MASKED


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def outgrown(most, at, fresh, factor):
    """Whether a score of `fresh`, from `at` on, exceeds the maximum in `most` by so much that sums must be rescaled.

    Weights up to 2 ** `_ROOM` are allowed: most new maxima are smaller than that, and a float32 sum has the same
    relative precision at any scale.
    """
    far = False
    for i in range(fresh.size):
        far |= (fresh[i] - most[at + i]) * factor > _ROOM
    return far
