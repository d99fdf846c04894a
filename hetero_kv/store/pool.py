"""The block pool of one layer: keys, values and representatives in DRAM, in reference-counted blocks."""

from __future__ import annotations

import math
import mmap
from collections import deque

import numpy as np
import torch

from hetero_kv.store.storage import StorageType


class BlockPool:
    """Fixed number of blocks of `block_size` tokens, each holding all kv heads of one layer.

    One large allocation per array that the operating system backs with memory only as blocks are written,
    so capacity costs nothing until it is used. Not for several threads at once.

    Attributes:
        keys: [num_blocks, kv_heads, block_size, storage.elements(k_dim)] in the storage type's dtype, on the CPU.
        values: [num_blocks, kv_heads, block_size, storage.elements(v_dim)], likewise.
        representatives: [num_blocks, kv_heads, representative_num, k_dim] in `storage.for_representatives`.
        key_array, value_array, representative_array: the kernels' views of the same memory.
        lengths: [num_blocks] int32, tokens written in each block.
        received: [num_blocks, kv_heads, block_size] float32, the attention that each key received from the queries
            that an operator watched; None where no operator does.
        is_shared: whether sequences ever held a block together.
    """

    def __init__(
        self,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        k_dim: int,
        v_dim: int,
        storage: StorageType,
        representative_num: int,
        keep_received: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.storage = storage
        kind = storage.for_representatives
        self.keys, self.key_array = _untouched((num_blocks, kv_heads, block_size), k_dim, storage)
        self.values, self.value_array = _untouched((num_blocks, kv_heads, block_size), v_dim, storage)
        self.representatives, self.representative_array = _untouched(
            (num_blocks, kv_heads, representative_num), k_dim, kind
        )
        self.lengths = np.zeros(num_blocks, dtype=np.int32)
        self.received = torch.empty(num_blocks, kv_heads, block_size) if keep_received else None
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self.is_shared = False
        self._freed: list[int] = []
        self._untouched = 0
        self._abandoned: deque[np.ndarray] = deque()

    @property
    def bytes_per_block(self) -> int:
        """DRAM that one block takes: keys, values, representatives, and received attention where it is kept."""
        arrays = (self.keys, self.values, self.representatives, self.received)
        return sum(array[0].numel() * array.element_size() for array in arrays if array is not None)

    @property
    def bytes_touched(self) -> int:
        """DRAM that this pool has ever written to, in bytes."""
        return self._untouched * self.bytes_per_block

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

        Raises MemoryError when the pool has fewer left; nothing is allocated then.
        """
        if count > self.free_blocks:
            raise MemoryError(f"the block pool has {self.free_blocks} free blocks of {self.num_blocks}, {count} wanted")
        reused = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        fresh = count - len(reused)
        ids = np.array([*reused, *range(self._untouched, self._untouched + fresh)], dtype=np.int32)
        self._untouched += fresh
        self._references[ids] = 1
        self.lengths[ids] = 0
        if self.received is not None:
            self.received[torch.from_numpy(ids.astype(np.int64))] = 0
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

    def _reclaim(self) -> None:
        while self._abandoned:
            self.release(self._abandoned.popleft())


def _untouched(shape: tuple[int, ...], dim: int, storage: StorageType) -> tuple[torch.Tensor, np.ndarray]:
    """Room for `shape` vectors of `dim` numbers, that the operating system gives as it is written; page-aligned.

    From numpy, which asks for huge pages where torch does not: they read faster.
    """
    size = math.prod(shape) * storage.bytes_per_vector(dim)
    # Whole pages of its own: a GPU reads it after they have been page-locked, and no page can be locked twice.
    raw = np.empty(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE, dtype=np.uint8)
    skipped = -raw.ctypes.data % mmap.PAGESIZE
    memory = raw[skipped : skipped + size]
    as_tensor = torch.from_numpy(memory).view(storage.dtype).reshape(*shape, storage.elements(dim))
    # Not -1, which is ambiguous for vectors of no numbers: a pool may hold values alone.
    as_array = memory.view(storage.kernel_dtype)
    return as_tensor, as_array.reshape(*shape, storage.bytes_per_vector(dim) // as_array.itemsize)
