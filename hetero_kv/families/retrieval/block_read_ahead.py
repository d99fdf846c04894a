"""Reads a step's blocks from a file ahead of the attention kernel: chooses them first, then reads all at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hetero_kv.cpu_ops.chosen_blocks import best_blocks
from hetero_kv.cpu_ops.estimating_step import EstimatingStep
from hetero_kv.cpu_ops.retrieval_step import AS_GIVEN, CHOSEN, EVERYTHING
from hetero_kv.cpu_ops.scores import block_scores
from hetero_kv.store.pool import BlockPool


class BlockReadAhead(NamedTuple):
    """A step whose blocks the operating system reads before the kernel attends to them.

    Attributes:
        pool: the pool, part of whose blocks are in a file.
        table, first, end, which, positions, allowed: as `RetrievalStep` takes them; positions below 0 mean no block.
    """

    pool: BlockPool
    table: np.ndarray
    first: int
    end: int
    which: int
    positions: np.ndarray
    allowed: np.ndarray

    def by_scores(self, q: np.ndarray, shared: bool, largest: bool, score: str, threads: int) -> int:
        """Choose as `RetrievalStep` would, and request the blocks. The arguments are those of `RetrievalStep`.

        Writes `positions`. Returns the `which` with which the step is to be called afterwards.
        """
        which = self.which
        if which == CHOSEN:
            # Queries that are not float32 are bfloat16 bits in uint16.
            numbers = q if q.dtype == np.float32 else (q.astype(np.uint32) << 16).view(np.float32)
            queries = np.ascontiguousarray(numbers.reshape(len(q), self.pool.keys.shape[1], -1, q.shape[3]))
            ids, representatives = self.table[:, self.first : self.end], self.pool.representative_array
            if self.allowed.shape[2]:
                # As in `RetrievalStep`, each kv head's part of a block is a separate row.
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
        self._request(self.positions)
        return which

    def by_rehearsal(self, native: EstimatingStep, arguments: tuple[Any, ...]) -> None:
        """Request the blocks that an `EstimatingStep` attends to when it is called with `arguments`.

        They are known only after the step's whole selection, which therefore runs twice. Candidates without a coarse
        copy of their keys are read one by one during the selection.
        """
        assert self.pool.read_ahead is not None
        positions = self.positions
        if self.which == CHOSEN or (self.which == AS_GIVEN and native.by_token):
            self.pool.read_ahead.request(self._always_attended())
            positions = native.rehearsed(*arguments)
        self._request(positions)

    def _always_attended(self) -> np.ndarray:
        """The blocks outside the Context, which every step attends to: [rows, first + blocks - end]."""
        return np.concatenate((self.table[:, : self.first], self.table[:, self.end :]), axis=1)

    def _request(self, positions: np.ndarray) -> None:
        assert self.pool.read_ahead is not None
        if self.which == EVERYTHING:
            self.pool.read_ahead.request(self.table)
            return
        row, each, at = np.nonzero(positions >= 0)
        chosen = self.table[row, self.first + positions[row, each, at]]
        self.pool.read_ahead.request(np.concatenate((self._always_attended().ravel(), chosen)))
