"""What kernels over runs of keys share: where a listed token lies, which come next, which a query cannot see."""

import numpy as np
from numba import njit

from cpu_ops.gathered_rows import row_address
from cpu_ops.inner import inner

UNSEEN = np.float32(-3e30)
"""Score of a token behind the query: finite, whatever it is scaled by, so that nothing becomes infinite by it."""
LEAST = np.float32(-1e30)
"""Below every score, and above `UNSEEN`: of a query that sees nothing yet, what is unseen weighs nothing."""
_ROOM = np.float32(8)


@inner
def places_of(past, new, row, head):
    """Where the vectors of one row and head lie, for `address_in`: the first and the pitch of either's, in bytes."""
    before, own = row_address(past, row, head, 0), row_address(new, row, head, 0)
    pitch, own_pitch = row_address(past, row, head, 1) - before, row_address(new, row, head, 1) - own
    # As if its tokens were counted from the first of all.
    return before, pitch, own - past.shape[2] * own_pitch, own_pitch


@njit(nogil=True, inline="always")
def address_in(places, held, token):
    """Where the vector of a token lies, of the `held` ones that came before the chunk or of its own."""
    before, pitch, own, own_pitch = places
    return before + token * pitch if token < held else own + token * own_pitch


@inner
def next_listed(runs, run, token, stop, listed):
    """The next tokens of the runs before `stop`: from `token` within `run` on, as many as `listed` takes.

    Returns the run and the token at which the next ones begin, and how many these are.
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


@inner
def hide(listed, filled, position, scores):
    """Take from the scores [tokens, queries] those of tokens behind a query, the first of which is at `position`."""
    for t in range(filled):
        for i in range(min(scores.shape[1], listed[t] - position)):
            scores[t, i] = UNSEEN


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def outgrown(most, at, fresh, factor):
    """Whether a score of `fresh` is so far above that of `most` from `at` on that sums are rescaled to it.

    Weights may be above 1 by `_ROOM` powers of two: most larger scores are not that much larger, and a sum of float32
    has as many digits whatever it is relative to.
    """
    far = False
    for i in range(fresh.size):
        far |= (fresh[i] - most[at + i]) * factor > _ROOM
    return far
