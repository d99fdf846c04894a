"""Which blocks of a layout are free and who holds the others; the blocks' contents lie in pools, one per layer."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hetero_kv.store.pool import BlockPool

if TYPE_CHECKING:
    from hetero_kv.store.block_table import BlockTable


class BlockAllocator:
    """Reference counts of `num_blocks` blocks of `block_size` tokens, the same in every pool of one layout.

    A block is held by block tables, and by as many as its count says. Not for several threads at once.

    Attributes:
        num_blocks: 0 until `provide`.
        lengths: [num_blocks] int32, tokens written in each block: what kernels go by.
        pools: the blocks' contents, a pool per layer of the layout, by layer index.
        is_shared: whether sequences ever held a block together.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.lengths = np.zeros(0, dtype=np.int32)
        self.pools: dict[int, BlockPool] = {}
        self.is_shared = False
        self._references = np.zeros(0, dtype=np.int32)
        self._freed: list[int] = []
        self._untouched = 0
        self._abandoned: deque[np.ndarray] = deque()
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()

    def provide(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks, none of them held; once, before the first is allocated."""
        self.num_blocks = num_blocks
        self.lengths = np.zeros(num_blocks, dtype=np.int32)
        self._references = np.zeros(num_blocks, dtype=np.int32)

    @property
    def touched_blocks(self) -> int:
        """Blocks that were ever allocated: the operating system has given memory for them."""
        return self._untouched

    @property
    def free_blocks(self) -> int:
        """Blocks that can still be allocated."""
        self._reclaim()
        return len(self._freed) + self.num_blocks - self._untouched

    def references(self, block: int) -> int:
        """How many sequences hold this block."""
        self._reclaim()
        return int(self._references[block])

    def copies_to_own(self, ids: np.ndarray) -> int:
        """Blocks to allocate before each of `ids` can be written to alone, as BlockTable.own does.

        An id may stand several times, once for every sequence that wants its own: the last holder needs no copy.
        """
        self._reclaim()
        blocks, wanted = np.unique(ids, return_counts=True)
        return int(wanted.sum() - (self._references[blocks] == wanted).sum())

    def allocate(self, count: int) -> np.ndarray:
        """Ids of `count` empty blocks, [count] int32, each held once.

        Raises MemoryError when fewer are left; nothing is allocated then.
        """
        if count > self.free_blocks:
            raise MemoryError(f"the block pool has {self.free_blocks} free blocks of {self.num_blocks}, {count} wanted")
        reused = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        fresh = count - len(reused)
        ids = np.array([*reused, *range(self._untouched, self._untouched + fresh)], dtype=np.int32)
        self._untouched += fresh
        self._references[ids] = 1
        self.lengths[ids] = 0
        return ids

    def retain(self, ids: np.ndarray) -> None:
        """Let one more sequence hold these blocks."""
        self.is_shared = True
        self._references[ids] += 1

    def release(self, ids: np.ndarray) -> None:
        """Let go of these blocks; those that nobody holds any more are free again."""
        self._references[ids] -= 1
        self._freed.extend(int(block) for block in ids[::-1] if self._references[block] == 0)

    def abandon(self, ids: np.ndarray) -> None:
        """Let go of these blocks before anything is next counted or allocated.

        For a sequence that is garbage-collected, which may happen in the middle of a `release`.
        """
        self._abandoned.append(ids)

    def copy(self, source: int, target: int) -> None:
        """Let block `target` have the contents of block `source`, in every pool."""
        for pool in self.pools.values():
            pool.copy(source, target)
        self.lengths[target] = self.lengths[source]

    def know(self, table: BlockTable) -> None:
        """Count the blocks of this table in `recount`."""
        self._tables.add(table)

    def recount(self) -> None:
        """Count anew who holds what, from the tables themselves: after a failure in the middle of a change."""
        self._abandoned.clear()
        references = np.zeros(self.num_blocks, dtype=np.int32)
        for table in self._tables:
            references[table.ids] += 1
        self._references = references
        self.is_shared = self.is_shared or bool((references > 1).any())
        self._freed = [block for block in range(self._untouched - 1, -1, -1) if not references[block]]

    def _reclaim(self) -> None:
        while self._abandoned:
            self.release(self._abandoned.popleft())
