"""The block table of one sequence in one layout: the ids of its blocks, in order, the same in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hetero_kv.store.allocator import BlockAllocator


class BlockTable:
    """A sequence as a list of blocks; all but the last are full.

    Sequences may share blocks (`fork`); a shared block is copied before it is written to. A dropped table releases its
    blocks.

    After an exception in the middle of a change, Ctrl-C included, reference counts agree with the tables.

    Attributes:
        length: tokens that the blocks have space for.
    """

    #: `__del__` reads it in a table whose construction failed.
    length = 0

    def __init__(self, allocator: BlockAllocator, capacity: int) -> None:
        self.allocator = allocator
        self._ids = np.empty(-(-capacity // allocator.block_size), dtype=np.int32)
        allocator.register(self)

    def __del__(self) -> None:
        if self.length:
            self.allocator.abandon(self.ids)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in use, the partial one included."""
        return -(-self.length // self.allocator.block_size)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the blocks in use, [num_blocks] int32, a view."""
        return self._ids[: self.num_blocks]

    def reserve(self, length: int) -> None:
        """Have blocks for `length` tokens in total, and make the last present block writable by this sequence alone.

        Raises MemoryError if too few blocks are free; the table is unchanged then.
        """
        allocator, block_size = self.allocator, self.allocator.block_size
        present, needed = self.num_blocks, -(-length // block_size)
        if length == self.length:
            return
        is_open = allocator.is_shared and self.length % block_size
        missing = needed - present + (allocator.copies_to_own(self.ids[present - 1 :]) if is_open else 0)
        if missing > allocator.free_blocks:
            raise MemoryError(
                f"the block pool has {allocator.free_blocks} free blocks of {allocator.num_blocks}, and {missing} are "
                "needed"
            )
        if is_open:
            self.own(present - 1, present)
        if needed > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(needed - len(self._ids), dtype=np.int32)])
        first = self.length // block_size
        if needed > present:
            with self._counted():
                self._ids[present:needed] = allocator.allocate(needed - present)
                self.length = length
        self.length = length
        allocator.lengths[self._ids[first : needed - 1]] = block_size
        allocator.lengths[self._ids[needed - 1]] = length - (needed - 1) * block_size

    def truncate(self, length: int) -> None:
        """Remove the tokens from position `length` on."""
        block_size = self.allocator.block_size
        kept, present = -(-length // block_size), self.num_blocks
        released = self._ids[kept:present].copy()
        with self._counted():
            self.length = length
            self.allocator.release(released)
        # A block that other sequences reference stays full; the next append copies it.
        if length % block_size and self.allocator.references(int(self._ids[kept - 1])) == 1:
            self.allocator.lengths[self._ids[kept - 1]] = length % block_size

    def adopt(self, ids: np.ndarray, length: int) -> None:
        """Make these blocks, of `length` tokens, this table's own. Call `BlockAllocator.recount` afterwards."""
        self._ids, self.length = ids.astype(np.int32), length

    def fork(self) -> BlockTable:
        """Returns a second sequence with the same tokens, which shares the blocks."""
        forked = BlockTable(self.allocator, 0)
        forked._ids = self._ids.copy()
        with self._counted():
            forked.length = self.length
            self.allocator.retain(forked.ids)
        return forked

    def free(self) -> None:
        """Release every block."""
        self.truncate(0)

    def own(self, first: int, stop: int) -> None:
        """Replace shared blocks among [first, stop) by copies, because they are about to be written to.

        Raises MemoryError if too few are free (see `BlockAllocator.copies_to_own`); earlier blocks are copied then.
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
        """A context of changes to tables and reference counts; on failure the counts are recomputed from the tables."""
        try:
            yield
        except BaseException:
            self.allocator.recount()
            raise
