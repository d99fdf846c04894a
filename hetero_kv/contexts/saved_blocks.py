"""Numbers the blocks of groups for saving: each sequence's blocks are consecutive, and shared blocks appear once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.sequence import Layout
from hetero_kv.store.allocator import BlockAllocator
from hetero_kv.store.pool_arrays import WRITTEN

# Blocks that are copied at once.
_AT_ONCE = 32
# Arrays with one entry per token; entries after a block's last token are stale.
_OF_TOKENS = ("keys", "values")


@dataclass(frozen=True)
class SavedBlocks:
    """The blocks of one layout.

    Attributes:
        sources: allocators, each with the pool ids of its blocks.
        tables: by group and row, the numbers of its blocks in the order of `sources`.
        lengths: [blocks] int32, tokens written in each.
        finalized: [blocks] bool, whether the block is finalized.
    """

    layout: Layout
    sources: list[tuple[BlockAllocator, np.ndarray]]
    tables: list[list[np.ndarray]]
    lengths: np.ndarray
    finalized: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[EqualLengthGroup], layout: Layout) -> SavedBlocks:
        """All blocks of `layout` in the block tables of these groups."""
        numbers: dict[tuple[int, int], int] = {}
        order: list[tuple[BlockAllocator, int]] = []
        tables: list[list[np.ndarray]] = []
        finalized: set[int] = set()
        # Allocator by allocator, so that each allocator's blocks form one run.
        allocators = {id(group.store): group.store.allocators[layout] for group in groups}
        for group in sorted(groups, key=lambda group: list(allocators).index(id(group.store))):
            allocator = allocators[id(group.store)]
            for sequence in group.sequences:
                for index, block in enumerate(sequence.tables[layout].ids.tolist()):
                    number = numbers.setdefault((id(allocator), block), len(order))
                    if number == len(order):
                        order.append((allocator, block))
                    if index < group.finalized[layout]:
                        finalized.add(number)
        for group in groups:
            key = id(allocators[id(group.store)])
            rows = [sequence.tables[layout].ids.tolist() for sequence in group.sequences]
            tables.append([np.array([numbers[key, block] for block in row], np.int32) for row in rows])
        sources = [
            (allocator, np.array([block for owner, block in order if owner is allocator], np.int64))
            for allocator in allocators.values()
        ]
        lengths = np.concatenate([allocator.lengths[ids] for allocator, ids in sources])
        return cls(layout, sources, tables, lengths, np.array([each in finalized for each in range(len(order))], bool))

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.lengths)

    def arrays(self) -> list[tuple[int, str, tuple[int, ...], torch.dtype]]:
        """The arrays of a block: layer index, name in the pool, shape per block, dtype."""
        pools = self.sources[0][0].pools
        return [
            (layer_idx, name, tuple(array.shape[1:]), array.dtype)
            for layer_idx in sorted(pools)
            for name, array in pools[layer_idx].arrays.items()
            if array[0].numel()
        ]

    def rows(self, layer_idx: int, name: str, kept: np.ndarray | None = None) -> Iterator[torch.Tensor]:
        """The blocks of one array, some at a time, as they are written: [blocks, ...].

        Args:
            kept: [blocks] bool, the blocks to include; None for all.
        """
        first = 0
        for allocator, ids in self.sources:
            array = allocator.pools[layer_idx].arrays[name]
            included = np.arange(len(ids)) if kept is None else np.flatnonzero(kept[first : first + len(ids)])
            for start in range(0, len(included), _AT_ONCE):
                numbers = included[start : start + _AT_ONCE]
                yield self._cleaned(array[torch.from_numpy(ids[numbers])], name, first + numbers)
            first += len(ids)

    def _cleaned(self, blocks: torch.Tensor, name: str, numbers: np.ndarray) -> torch.Tensor:
        """`blocks`, a copy whose stale entries are set to zero in place."""
        for index, number in enumerate(numbers.tolist()):
            if name not in WRITTEN and not self.finalized[number]:
                blocks[index].zero_()
            elif name in _OF_TOKENS and self.lengths[number] < self.layout.block_size:
                blocks[index, :, self.lengths[number] :].zero_()
        return blocks
