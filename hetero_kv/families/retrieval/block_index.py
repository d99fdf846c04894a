"""What a GPU needs to choose among a Context's blocks: a copy of the arrays of the pool by which they are scored."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hetero_kv.store.pool import BlockPool


class BlockIndex:
    """Copies of some of a pool's arrays, in memory of a fixed size.

    Args:
        pool: the layer's blocks in DRAM.
        names: of these arrays.
        capacity: the most blocks of a sequence; 0 where nothing is chosen.
        batch: number of sequences.
        device: the GPU.
    """

    def __init__(self, pool: BlockPool, names: Sequence[str], capacity: int, batch: int, device: torch.device) -> None:
        # Block by block, so that new ones of a row arrive in one copy.
        self._arrays = {
            name: array.new_zeros((batch, capacity, *array.shape[1:]), device=device)
            for name, array in pool.arrays.items()
            if name in names
        }
        self._capacity = capacity
        #: Blocks of the Context that are here.
        self.count = 0

    def arrays(self, names: Sequence[str]) -> list[torch.Tensor]:
        """These arrays, [batch, kv_heads, capacity, ...] each."""
        return [self._arrays[name].movedim(1, 2) for name in names]

    def take_in(self, pool: BlockPool, context: Sequence[np.ndarray] | np.ndarray) -> None:
        """Send the blocks that have entered the Context since the last call.

        context: the Context's blocks in the pool, for each row.
        """
        first, end = self.count, len(context[0])
        if first < end and self._capacity:
            stored = pool.arrays
            for row, blocks in enumerate(context):
                ids = torch.from_numpy(blocks[first:end].astype(np.int64))
                for name, array in self._arrays.items():
                    array[row, first:end].copy_(stored[name][ids].pin_memory(), non_blocking=True)
        self.count = end

    def take_computed(self, first: int, derived: Mapping[str, torch.Tensor]) -> None:
        """Take blocks from the Context's block `first` on, if they follow those that are here.

        derived: these arrays and others, [batch, blocks, ...], as the pool stores them, on the device.
        """
        end = first + derived["representatives"].shape[1]
        if first == self.count and self._capacity:
            for name, array in self._arrays.items():
                array[:, first:end].copy_(derived[name])
            self.count = end

    def shorten(self, context: int) -> None:
        """Forget all but the first `context` blocks of the Context."""
        self.count = min(self.count, context)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(array.nbytes for array in self._arrays.values())

    def selected(self, rows: list[int]) -> BlockIndex:
        """New memory, whose row i is a copy of row `rows[i]`."""
        new = copy.copy(self)
        # Slices, because indexing with a list would copy it to the device, and the host would wait for that.
        new._arrays = {name: torch.cat([array[row : row + 1] for row in rows]) for name, array in self._arrays.items()}
        return new
