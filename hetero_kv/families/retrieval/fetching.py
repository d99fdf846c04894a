"""Blocks that lie in a file, chosen before the native call that attends to them, so that they are read all at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cpu_ops.chosen_blocks import best_blocks
from cpu_ops.estimating_step import EstimatingStep
from cpu_ops.retrieval_step import AS_GIVEN, CHOSEN, EVERYTHING
from cpu_ops.scores import block_scores
from hetero_kv.store.pool import BlockPool


class Fetching(NamedTuple):
    """A step whose blocks the system is to read before it attends to them.

    Attributes:
        pool: of which blocks lie in a file.
        table, first, end, which, positions, allowed: as `RetrievalStep` takes them; positions below 0 are none.
    """

    pool: BlockPool
    table: np.ndarray
    first: int
    end: int
    which: int
    positions: np.ndarray
    allowed: np.ndarray

    def by_scores(self, q: np.ndarray, shared: bool, largest: bool, score: str, threads: int) -> int:
        """Make the choice that `RetrievalStep` would make; the other arguments are its own, score its `score`.

        Positions are written. Returns which blocks the step is to attend to then.
        """
        which = self.which
        if which == CHOSEN:
            # What else comes is the bits of bfloat16.
            numbers = q if q.dtype == np.float32 else (q.astype(np.uint32) << 16).view(np.float32)
            queries = np.ascontiguousarray(numbers.reshape(len(q), self.pool.keys.shape[1], -1, q.shape[3]))
            ids, representatives = self.table[:, self.first : self.end], self.pool.representative_array
            if self.allowed.shape[2]:
                # As there: each kv head's part of a block is a row of its own.
                heads = np.arange(queries.shape[1], dtype=np.int32)[:, None]
                ids = np.take_along_axis(ids[:, None], self.allowed, axis=2) * len(heads) + heads
                ids = ids.reshape(-1, ids.shape[2])
                representatives = representatives.reshape(-1, 1, *representatives.shape[2:])
            counts = np.full(len(ids), ids.shape[1], np.int32)
            scores = block_scores(
                queries.reshape(len(ids), -1, *queries.shape[2:]), representatives, np.ascontiguousarray(ids), counts,
                score, threads=threads,
            ).reshape(*queries.shape[:3], -1)  # fmt: skip
            self.positions[:] = best_blocks(scores, self.positions.shape[2], self.allowed, shared, largest)
            which = AS_GIVEN
        self._ask(self.positions)
        return which

    def by_rehearsal(self, native: EstimatingStep, given: tuple[Any, ...]) -> None:
        """Have those blocks read to which an `EstimatingStep` attends that is called with `given`.

        They are known after all that it does before, so that this is done twice. Only where candidates have no coarse
        copies of their keys are theirs read as they come.
        """
        assert self.pool.read_ahead is not None
        positions = self.positions
        if self.which == CHOSEN or (self.which == AS_GIVEN and native.by_token):
            self.pool.read_ahead.ask(self._beside())
            positions = native.rehearsed(*given)
        self._ask(positions)

    def _beside(self) -> np.ndarray:
        """The blocks around the Context, to which every step attends, [rows, first + blocks - end]."""
        return np.concatenate((self.table[:, : self.first], self.table[:, self.end :]), axis=1)

    def _ask(self, positions: np.ndarray) -> None:
        assert self.pool.read_ahead is not None
        if self.which == EVERYTHING:
            self.pool.read_ahead.ask(self.table)
            return
        row, each, at = np.nonzero(positions >= 0)
        chosen = self.table[row, self.first + positions[row, each, at]]
        self.pool.read_ahead.ask(np.concatenate((self._beside().ravel(), chosen)))
