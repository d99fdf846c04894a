"""The DRAM store of a cache and its forks, or of many caches: a block allocator per layout, a pool per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hetero_kv.engine import reservations
from hetero_kv.engine.sequence import Layout, Sequence
from hetero_kv.gpu_ops.prefetch import Prefetch
from hetero_kv.gpu_ops.write_out import WriteOut
from hetero_kv.store.allocator import BlockAllocator
from hetero_kv.store.block_table import BlockTable
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray
from hetero_kv.store.storage import StorageType


class Store:
    """Blocks for `rows` sequences of `capacity` tokens each, and for the same in each of `forks` forks.

    With `tokens`, caches of one model share the store: each of their sequences takes blocks as it grows, up to
    `capacity` tokens, and all of them together hold at most `tokens`.

    Nothing is allocated before the first tokens: `provide` allocates blocks, then each layer creates its pool once its
    shapes are known.

    Args:
        capacity: tokens that a sequence can store.
        forks: number of planned forks, each of which can grow to `capacity`.
        planned: DRAM of the full store, bytes; 0 without a plan.
        is_auto: whether the capacity is as much as fits (`max_seq_len: auto`), and is decided with the first tokens.
        tokens: tokens of all sequences together; None for the store of one cache and its forks.
        maker: the rules whose caches share the store; None for that of one cache.
        budget: the largest DRAM of all caches of this process together, bytes; None: all that is free.

    Attributes:
        capacity, forks, planned, is_auto, tokens, maker, budget: the arguments.
        rows: number of sequences with blocks; 0 until `provide`.
        allocators: by layout.
        mapped: by layer index, the layer's mappings of its pool's memory for other devices.
        device_tokens: by a family's keys, data of decoded tokens on a device that layers and caches share.
    """

    def __init__(
        self, capacity: int, forks: int = 0, planned: int = 0, is_auto: bool = False, tokens: int | None = None,
        maker: Any = None, budget: int | None = None,
    ) -> None:  # fmt: skip
        self.capacity = capacity
        self.forks = forks
        self.planned, self.is_auto, self.tokens, self.maker, self.budget = planned, is_auto, tokens, maker, budget
        self.rows = 0
        self.allocators: dict[Layout, BlockAllocator] = {}
        self.mapped: dict[int, Any] = {}
        self.device_tokens: dict[Any, Any] = {}
        self._write_outs: dict[torch.device, WriteOut] = {}
        self._prefetches: dict[torch.device, Prefetch] = {}
        reservations.register(self)

    @property
    def is_common(self) -> bool:
        """Whether several caches share the store."""
        return self.tokens is not None

    def empty_copy(self) -> Store:
        """An empty store with the same arguments; for a common store itself, as sequences return their blocks."""
        return (
            self if self.is_common else Store(self.capacity, self.forks, self.planned, self.is_auto, budget=self.budget)
        )

    @property
    def waits(self) -> bool:
        """Whether its capacity is not planned yet: `auto` plans it from the free memory when the first tokens come."""
        return self.is_auto and not self.rows

    @property
    def outstanding(self) -> int:
        """DRAM that is planned and not yet allocated, bytes."""
        if not self.rows:
            return 0 if self.is_auto else self.planned
        filled = [each.touched_blocks / each.num_blocks for each in self.allocators.values() if each.num_blocks]
        # Layers without blocks allocate all their memory with the first tokens.
        return int(self.planned * (1 - max(filled, default=1.0)))

    def write_out(self, device: torch.device) -> WriteOut:
        """The stream that copies prompts from a GPU; all layers share it, and only one has a prompt at a time."""
        if device not in self._write_outs:
            self._write_outs[device] = WriteOut(device)
        return self._write_outs[device]

    def prefetch(self, device: torch.device) -> Prefetch:
        """The stream that copies stored tokens back to a GPU; all layers share it."""
        if device not in self._prefetches:
            self._prefetches[device] = Prefetch(device)
        return self._prefetches[device]

    def provide(self, layouts: Iterable[Layout], rows: int) -> None:
        """Allocate blocks of these layouts for `rows` sequences and their planned forks.

        A common store allocates the blocks of all its tokens at the first call.
        """
        if self.tokens is not None:
            self.rows = max(self.rows, rows)
            for layout in layouts:
                if layout not in self.allocators:
                    allocator = self.allocators[layout] = BlockAllocator(layout.block_size)
                    allocator.provide(-(-self.tokens // layout.block_size))
            return
        self.rows = rows
        for layout in layouts:
            allocator = BlockAllocator(layout.block_size)
            allocator.provide(rows * -(-self.capacity // layout.block_size) * (1 + self.forks))
            self.allocators[layout] = allocator

    def free_blocks(self, layout: Layout) -> int:
        """Blocks of a common store's layout that no sequence has."""
        assert self.tokens is not None
        allocator = self.allocators.get(layout)
        return -(-self.tokens // layout.block_size) if allocator is None else allocator.free_blocks

    def table(self, layout: Layout) -> BlockTable:
        """An empty block table."""
        return BlockTable(self.allocators[layout], self.capacity)

    def pool(
        self,
        layer_idx: int,
        layout: Layout,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        storage: StorageType,
        representative_num: int = 0,
        accumulates: bool = False,
        value_means: bool = False,
        key_codes: bool = False,
        grouped: bool = False,
        *,
        value_storage: StorageType | None = None,
        offset_keys: bool = False,
        representative_storage: StorageType | None = None,
        auxiliary: Mapping[str, AuxiliaryArray] | None = None,
    ) -> BlockPool:
        """The pool of a layer for blocks of `layout`, made at the first call; see BlockPool for the other arguments."""
        allocator = self.allocators[layout]
        if layer_idx not in allocator.pools:
            allocator.pools[layer_idx] = BlockPool(
                allocator.num_blocks,
                kv_heads,
                layout.block_size,
                k_dim,
                v_dim,
                storage,
                representative_num,
                accumulates,
                value_means,
                key_codes,
                grouped,
                value_storage=value_storage,
                offset_keys=offset_keys,
                representative_storage=representative_storage,
                auxiliary=auxiliary,
            )
        return allocator.pools[layer_idx]

    @property
    def dram_bytes(self) -> int:
        """DRAM that the blocks have touched, over all pools, bytes."""
        # Lists, because another thread may add a pool meanwhile.
        return sum(
            allocator.touched_blocks * pool.bytes_per_block
            for allocator in list(self.allocators.values())
            for pool in list(allocator.pools.values())
        )

    def shared_bytes(self, sequences: Iterable[Sequence]) -> int:
        """DRAM of the blocks that these sequences share with others, bytes."""
        total = 0
        listed = list(sequences)
        for layout, allocator in self.allocators.items():
            if not allocator.is_shared or not listed:
                continue
            ids = np.concatenate([sequence.tables[layout].ids for sequence in listed])
            blocks, mine = np.unique(ids, return_counts=True)
            shared = sum(allocator.references(block) > own for block, own in zip(blocks, mine, strict=True))
            total += int(shared) * sum(pool.bytes_per_block for pool in allocator.pools.values())
        return total
