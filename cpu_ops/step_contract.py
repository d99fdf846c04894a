"""What callers of `cpu_ops.retrieval_step`, its kernel and the kernel's stages agree on: names of numbers."""

from typing import NamedTuple

import numpy as np

EVERYTHING, AS_GIVEN, CHOSEN = 0, 1, 2
"""Which blocks a step attends to: all; those at the positions passed in; those that it chooses."""
NOTHING_FORBIDDEN = np.empty((0, 0, 0), np.int32)

BAD_PLACE, BAD_CONTEXT, BAD_LISTS, BAD_SHAPES = -1.0, -2.0, -3.0, -4.0
REFUSALS = {
    BAD_PLACE: "the position must lie in the blocks of table, and those in the pool",
    BAD_CONTEXT: "the blocks of table must lie in the pool, and allowed positions in the context",
    BAD_LISTS: "lists of blocks, or their lengths, must lie in the pool",
    BAD_SHAPES: "q, k, v, table, positions, allowed, out and lse must have the rows, heads and dimensions that it was "
    "bound to, and no more positions be chosen than are allowed",
}

(
    RUN, STORE, SCORER, SCORE, ATTENDER, ATTEND, CHOOSE, LOOK, RESTER, REST, CHOOSE_TOKENS, TOKEN_ATTENDER, _,
    CAUSAL, CAUSAL_TILES,
) = range(15)  # fmt: skip
"""The places of kernels and regions in a step's `calls`, an array of addresses. A kernel (SCORER) is followed by the
region that it runs (SCORE). The regions of `causal_attention` are run by ATTENDER's kernel, too."""

LONG = 16384
"""Tokens of a sequence from which on consecutive ones may share a reading of its blocks. Sums are rounded otherwise
then than for one token, so that an answer may differ at near ties; behind shorter contexts little would be gained."""


class StepSettings(NamedTuple):
    """Integers that a step is bound to; an array in this order for the kernel.

    Attributes:
        group, k_dim, v_dim: query heads of a kv head, dimensions of a key and of a value.
        block_size: tokens of a block.
        threads: number of threads.
        key_bytes, value_bytes, vector_bytes, mean_bytes, coarse_bytes, coarse_mean_bytes: item sizes of keys, values,
            representatives, mean values, and of the keys and means by which candidates are scored.
        reduce, rerank, least, group_blocks, group_factor, tokens, candidates: as in `retrieval_step.BlockChoice`.
        has_mean: whether a block's first representative is the mean of its keys.
        has_codes: whether candidates are scored by coarse copies of their keys.
        adds_rest: whether the mean values of what is not attended to count.
        fewest_by_tiles: so many queries of a kv head, of consecutive tokens of a sequence, are computed by tiles.
        rehearses: whether a call ends before it attends to the Context.
    """

    group: int
    k_dim: int
    v_dim: int
    block_size: int
    threads: int
    key_bytes: int
    value_bytes: int
    vector_bytes: int
    mean_bytes: int
    coarse_bytes: int
    coarse_mean_bytes: int
    reduce: int
    rerank: int
    least: int
    group_blocks: int
    group_factor: int
    tokens: int
    candidates: int
    has_mean: int
    has_codes: int
    adds_rest: int
    fewest_by_tiles: int
    rehearses: int


ATTENDED, CANDIDATES, SCORED, GROUPS, OPENED, TOUCHED, WHOLE = range(7)
"""The columns of a step's `taken`: attended blocks (or tokens) of the Context, candidate blocks whose keys were scored,
blocks scored by representatives, scored groups, opened groups, blocks attended at least in part, and as a whole."""


def row_ranges(rows: int, position: int, first: int, end: int) -> np.ndarray:
    """The `ranges` of `RetrievalStep` for rows of equal length: [3, rows] int64."""
    return np.repeat(np.array([[position], [first], [end]]), rows, axis=1)
