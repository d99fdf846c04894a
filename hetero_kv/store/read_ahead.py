"""Blocks that lie in a file, read by the system before they are attended to, all at once and meanwhile."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.store.memory import will_need

# Steps without a wait behind which everything is taken to be in memory.
_QUIET_LOOKS = 16


class ReadAhead:
    """Asks for blocks of a pool of which pages are mapped from a file: a page that is touched before it is there is
    waited for, one after the other.

    Where this process has not had to wait for any page for a while, all that it uses is in memory, and nobody is asked.
    Where memory is short the system lets go of pages that it can read anew; then there are waits again.

    Args:
        arrays: of the pool, that attention reads block by block: [num_blocks, ...] each, contiguous.
        num_blocks: of the pool.

    Attributes:
        following: of the pool that is read next, if one is.
    """

    def __init__(self, arrays: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._arrays = [(array.data_ptr(), array[0].numel() * array.element_size()) for array in arrays]
        self._in_file = np.zeros(num_blocks, bool)
        # In the file, and not asked for since the last wait.
        self._unasked = np.zeros(num_blocks, bool)
        self._waits, self._looks = -1, 0
        self.following: ReadAhead | None = None

    def add(self, start: int, stop: int) -> None:
        """Blocks [start, stop) lie in a file."""
        self._in_file[start:stop] = self._unasked[start:stop] = True

    def is_worth_it(self) -> bool:
        """Whether there may be blocks that are not in memory; to be asked once a step."""
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if waits != self._waits:
            self._waits, self._looks = waits, 0
            self._unasked[:] = self._in_file
        self._looks += 1
        return self._looks <= _QUIET_LOOKS

    def ask(self, ids: np.ndarray) -> None:
        """Have blocks `ids`, of any shape, read, each once; returns at once."""
        wanted = np.unique(ids)
        wanted = wanted[self._unasked[wanted]]
        if not wanted.size:
            return
        self._unasked[wanted] = False
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
            for address, size in self._arrays:
                will_need(address + int(run[0]) * size, len(run) * size)

    def ask_all(self) -> None:
        """Have all blocks read, and those of the pool that is read next: they come while these are attended to."""
        for pool in (self, self.following):
            if pool is not None and pool.is_worth_it():
                pool.ask(np.flatnonzero(pool._in_file))
