"""Blocks that lie in a file, chosen before the native call that attends to them, so that they are read all at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cpu_ops.chosen_blocks import attended_ids, best_blocks
from cpu_ops.retrieval_step import AS_GIVEN, CHOSEN, EVERYTHING
from cpu_ops.scores import block_scores
from hetero_kv.store.pool import BlockPool


class Chosen(NamedTuple):
    """Which blocks a step attends to, and how it chooses them: see `RetrievalStep`."""

    which: int
    positions: np.ndarray
    allowed: np.ndarray
    shared: bool
    largest: bool
    score: str


def fetched(
    pool: BlockPool, q: np.ndarray, table: np.ndarray, first: int, end: int, chosen: Chosen, threads: int
) -> int:
    """Have the system read what a step is about to attend to; `q`, `table`, `first` and `end` are `RetrievalStep`'s.

    The choice that the step would make is made here; its positions are written. Returns which blocks the step is to
    attend to then.
    """
    assert pool.read_ahead is not None
    which = chosen.which
    if which == CHOSEN:
        # What else comes is the bits of bfloat16.
        numbers = q if q.dtype == np.float32 else (q.astype(np.uint32) << 16).view(np.float32)
        queries = np.ascontiguousarray(numbers.reshape(len(q), pool.keys.shape[1], -1, q.shape[3]))
        context = np.ascontiguousarray(table[:, first:end])
        counts = np.full(len(table), end - first, np.int32)
        scores = block_scores(queries, pool.representative_array, context, counts, chosen.score, threads=threads)
        count = chosen.positions.shape[2]
        chosen.positions[:] = best_blocks(scores, count, chosen.allowed, chosen.shared, chosen.largest)
        which = AS_GIVEN
    # Positions below 0 are none.
    attended = table if which == EVERYTHING else attended_ids(table, np.maximum(chosen.positions, 0), first, end)
    pool.read_ahead.ask(attended)
    return which
