"""Reads blocks of a file ahead of attention, all at once and in the background."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.store.memory import will_need

# After so many steps without a major page fault all blocks count as in memory.
_QUIET_LOOKS = 16


class ReadAhead:
    """Requests blocks of a pool whose pages are mapped from a file, because page faults would read them one by one.

    Once this process has had no major page fault for `_QUIET_LOOKS` steps, everything it uses is in memory and requests
    stop. If memory gets short, the system drops such pages; page faults, and then requests, start again.

    Args:
        arrays: the pool's arrays that attention reads block by block, [num_blocks, ...] each, contiguous.
        num_blocks: number of blocks of the pool.

    Attributes:
        following: the `ReadAhead` of the pool that is read next, or None.
    """

    def __init__(self, arrays: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._arrays = [(array.data_ptr(), array[0].numel() * array.element_size()) for array in arrays]
        self._in_file = np.zeros(num_blocks, bool)
        # In the file, and not requested since the last page fault.
        self._unasked = np.zeros(num_blocks, bool)
        self._waits, self._looks = -1, 0
        self.following: ReadAhead | None = None

    def add(self, start: int, stop: int) -> None:
        """Record that blocks [start, stop) are in a file."""
        self._in_file[start:stop] = self._unasked[start:stop] = True

    def is_worth_it(self) -> bool:
        """Whether blocks may be outside memory. Call it once a step."""
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if waits != self._waits:
            self._waits, self._looks = waits, 0
            self._unasked[:] = self._in_file
        self._looks += 1
        return self._looks <= _QUIET_LOOKS

    def request(self, ids: np.ndarray) -> None:
        """Request each of the blocks `ids`, of any shape, once; returns without waiting."""
        missing = np.unique(ids)
        missing = missing[self._unasked[missing]]
        if not missing.size:
            return
        self._unasked[missing] = False
        for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1):
            for address, size in self._arrays:
                will_need(address + int(run[0]) * size, len(run) * size)

    def request_all(self) -> None:
        """Request all blocks, and those of the following pool: these are read while this pool is attended to."""
        for pool in (self, self.following):
            if pool is not None and pool.is_worth_it():
                pool.request(np.flatnonzero(pool._in_file))
