"""The block table of one sequence in one layout: which blocks hold its tokens, in order, in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hetero_kv.store.allocator import BlockAllocator


class BlockTable:
    """A sequence as a list of blocks; all but the last are full.

    Blocks may be shared with other sequences (`fork`); a shared block is copied before it is written to. A table that
    is dropped lets go of its blocks.

    Whatever is raised in the middle of a change, Ctrl-C included: blocks are held by the tables that say so, and by
    nobody else.

    Attributes:
        length: tokens that there are blocks for.
    """

    #: What `__del__` finds in a table that could not be made.
    length = 0

    def __init__(self, allocator: BlockAllocator, capacity: int) -> None:
        self.allocator = allocator
        self._ids = np.empty(-(-capacity // allocator.block_size), dtype=np.int32)
        allocator.know(self)

    def __del__(self) -> None:
        if self.length:
            self.allocator.abandon(self.ids)

    @property
    def num_blocks(self) -> int:
        """Blocks in use, the partial one included."""
        return -(-self.length // self.allocator.block_size)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the blocks in use, [num_blocks] int32, a view."""
        return self._ids[: self.num_blocks]

    def reserve(self, length: int) -> None:
        """Have blocks for `length` tokens, of which the present ones are some, and the last present block for itself.

        Raises MemoryError when too few blocks are free; the table is as it was then.
        """
        allocator, block_size = self.allocator, self.allocator.block_size
        held, needed = self.num_blocks, -(-length // block_size)
        if length == self.length:
            return
        is_open = allocator.is_shared and self.length % block_size
        wanted = needed - held + (allocator.copies_to_own(self.ids[held - 1 :]) if is_open else 0)
        if wanted > allocator.free_blocks:
            raise MemoryError(
                f"the block pool has {allocator.free_blocks} free blocks of {allocator.num_blocks}, {wanted} wanted"
            )
        if is_open:
            self.own(held - 1, held)
        if needed > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(needed - len(self._ids), dtype=np.int32)])
        first = self.length // block_size
        if needed > held:
            with self._counted():
                self._ids[held:needed] = allocator.allocate(needed - held)
                self.length = length
        self.length = length
        allocator.lengths[self._ids[first : needed - 1]] = block_size
        allocator.lengths[self._ids[needed - 1]] = length - (needed - 1) * block_size

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        block_size = self.allocator.block_size
        kept, held = -(-length // block_size), self.num_blocks
        released = self._ids[kept:held].copy()
        with self._counted():
            self.length = length
            self.allocator.release(released)
        # A block that others still hold in full is copied when something is appended.
        if length % block_size and self.allocator.references(int(self._ids[kept - 1])) == 1:
            self.allocator.lengths[self._ids[kept - 1]] = length % block_size

    def adopt(self, ids: np.ndarray, length: int) -> None:
        """Hold these blocks, of `length` tokens; the allocator counts them when it counts anew (`recount`)."""
        self._ids, self.length = ids.astype(np.int32), length

    def fork(self) -> BlockTable:
        """A second sequence with the same tokens, sharing the blocks."""
        twin = BlockTable(self.allocator, 0)
        twin._ids = self._ids.copy()
        with self._counted():
            twin.length = self.length
            self.allocator.retain(twin.ids)
        return twin

    def free(self) -> None:
        """Let go of every block."""
        self.truncate(0)

    def own(self, first: int, stop: int) -> None:
        """Replace those of the blocks [first, stop) that others hold too by copies: they are about to be written to.

        Raises MemoryError when too few are free (`BlockAllocator.copies_to_own`); the blocks before are copied then.
        """
        allocator = self.allocator
        for index in range(first, stop):
            shared = int(self._ids[index])
            if allocator.references(shared) == 1:
                continue
            with self._counted():
                copy = allocator.allocate(1)
                allocator.copy(shared, int(copy[0]))
                self._ids[index] = copy[0]
                allocator.release(np.array([shared]))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Within this context tables and the allocator's counts change; where it fails, the tables are right."""
        try:
            yield
        except BaseException:
            self.allocator.recount()
            raise
