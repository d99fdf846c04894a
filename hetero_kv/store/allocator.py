"""Reference counts of a layout's blocks. The blocks' contents are in pools, one per layer."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hetero_kv.store.pool import BlockPool

if TYPE_CHECKING:
    from hetero_kv.store.block_table import BlockTable

# So many blocks a prompt leaves to decoded tokens, which would otherwise be the first to write in memory behind the
# prompt's, in all layers at once: the system backs a layer's next two megabytes in up to 5 ms.
_LEFT_TO_TOKENS = 16


class BlockAllocator:
    """Reference counts of `num_blocks` blocks of `block_size` tokens, the same in every pool of one layout.

    A block's count is the number of block tables that reference it. Not safe for several threads at once.

    Attributes:
        num_blocks: 0 until `provide`.
        lengths: [num_blocks] int32, the tokens written in each block, for kernels.
        pools: the blocks' contents, one pool per layer of the layout, by layer index.
        is_shared: whether sequences have ever shared a block.
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
        """Make `num_blocks` unreferenced blocks available; called once, before the first allocation."""
        self.num_blocks = num_blocks
        self.lengths = np.zeros(num_blocks, dtype=np.int32)
        self._references = np.zeros(num_blocks, dtype=np.int32)

    @property
    def touched_blocks(self) -> int:
        """Number of blocks that were ever allocated, and thus are backed by memory."""
        return self._untouched

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can still be allocated."""
        self._reclaim()
        return self.unused_blocks

    @property
    def unused_blocks(self) -> int:
        """As `free_blocks`, without those of sequences that were just collected. Any thread may read it."""
        return len(self._freed) + self.num_blocks - self._untouched

    def references(self, block: int) -> int:
        """Number of sequences that reference this block."""
        self._reclaim()
        return int(self._references[block])

    def references_of(self, blocks: np.ndarray) -> np.ndarray:
        """As `references`, for several blocks at once."""
        self._reclaim()
        return self._references[blocks]

    def copies_to_own(self, ids: np.ndarray) -> int:
        """Number of blocks to allocate before each of `ids` is writable by one sequence alone (see `BlockTable.own`).

        An id occurs once for every sequence that needs a private block. A block's last owner needs no copy.
        """
        self._reclaim()
        if (self._references[ids] == 1).all():
            return 0
        blocks, counts = np.unique(ids, return_counts=True)
        return int(counts.sum() - (self._references[blocks] == counts).sum())

    def allocate(self, count: int) -> np.ndarray:
        """Allocate `count` empty blocks and return their ids, [count] int32; each has one reference.

        Raises MemoryError if fewer are free; nothing is allocated then.
        """
        if count > self.free_blocks:
            raise MemoryError(
                f"the block pool has {self.free_blocks} free blocks of {self.num_blocks}, and {count} are needed"
            )
        fresh = self.num_blocks - self._untouched
        left = _LEFT_TO_TOKENS if self._untouched and count > _LEFT_TO_TOKENS else 0
        reused = [self._freed.pop() for _ in range(min(count, max(len(self._freed) - left, count - fresh)))]
        first = self._untouched
        if len(reused) < count:
            first += min(max(0, left - len(self._freed)), fresh - count + len(reused))
            self._freed[:0] = range(self._untouched, first)
            self._untouched = first + count - len(reused)
        ids = np.array([*reused, *range(first, first + count - len(reused))], dtype=np.int32)
        self._references[ids] = 1
        self.lengths[ids] = 0
        return ids

    def retain(self, ids: np.ndarray) -> None:
        """Add one reference to each of these blocks."""
        self.is_shared = True
        self._references[ids] += 1

    def release(self, ids: np.ndarray) -> None:
        """Remove one reference from each of these blocks; blocks without references are free again."""
        self._references[ids] -= 1
        self._freed.extend(int(block) for block in ids[::-1] if self._references[block] == 0)

    def abandon(self, ids: np.ndarray) -> None:
        """Release these blocks at the next count or allocation.

        For garbage-collected sequences: collection may happen in the middle of a `release`.
        """
        self._abandoned.append(ids)

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of block `source` to block `target`, in every pool."""
        for pool in self.pools.values():
            pool.copy(source, target)
        self.lengths[target] = self.lengths[source]

    def register(self, table: BlockTable) -> None:
        """Register this table, so that `recount` counts its blocks."""
        self._tables.add(table)

    def recount(self) -> None:
        """Recompute all reference counts from the registered tables, after a failure in the middle of a change."""
        # References, so that no table is collected, and abandons its blocks, behind the count.
        tables = list(self._tables)
        self._abandoned.clear()
        references = np.zeros(self.num_blocks, dtype=np.int32)
        for table in tables:
            references[table.ids] += 1
        self._references = references
        self.is_shared = self.is_shared or bool((references > 1).any())
        self._freed = [block for block in range(self._untouched - 1, -1, -1) if not references[block]]

    def _reclaim(self) -> None:
        while self._abandoned:
            self.release(self._abandoned.popleft())
