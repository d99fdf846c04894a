"""Reads a step's blocks from a file ahead of the attention kernel: chooses them first, then reads all at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, CHOSEN, EVERYTHING
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time
from hetero_kv.store.pool import BlockPool


class BlockReadAhead(NamedTuple):
    """A step whose blocks the operating system reads before the kernel attends to them.

    Attributes:
        pool: the pool, part of whose blocks are in a file.
        table, first, end, which, positions: as `RetrievalStep` takes them; positions below 0 mean no block.
    """

    pool: BlockPool
    table: np.ndarray
    first: int
    end: int
    which: int
    positions: np.ndarray

    def request(self, native: RetrievalStep, arguments: tuple[Any, ...]) -> int:
        """Request the blocks that `native` attends to when it is called with `arguments`.

        They are known only after the step's whole selection, which runs first without attending. Candidates without a
        coarse copy of their keys are read one by one during the selection. A step with estimates selects again when it
        is called; for others `positions` is written.

        Returns the `which` with which the step is to be called afterwards.
        """
        assert self.pool.read_ahead is not None
        which, positions = self.which, self.positions
        if which == CHOSEN or (which == AS_GIVEN and native.by_token):
            self.pool.read_ahead.request(self._always_attended())
            with one_kernel_at_a_time:
                positions = native.rehearsed(*arguments)
            if not native.estimates:
                self.positions[:], which = positions, AS_GIVEN
        self._request(positions)
        return which

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
