"""The block pool of one layer: keys, values and representatives in DRAM, in reference-counted blocks."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.kv.storage import StorageType

_CACHE_LINE = 64


class BlockPool:
    """Fixed number of blocks of `block_size` tokens, each holding all kv heads of one layer.

    One large allocation per array that the operating system backs with memory only as blocks are written,
    so capacity costs nothing until it is used.

    Attributes:
        keys: [num_blocks, kv_heads, block_size, k_dim] in the storage type, on the CPU.
        values: [num_blocks, kv_heads, block_size, v_dim] in the storage type, on the CPU.
        representatives: [num_blocks, kv_heads, representative_num, k_dim] in the storage type.
        lengths: [num_blocks] int32, tokens written in each block.
        received: [num_blocks, kv_heads, block_size] float32, the attention that each key received from the queries
            that an operator watched; None where no operator does.
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
        element = np.dtype(storage.element)
        self.keys = _untouched((num_blocks, kv_heads, block_size, k_dim), element)
        self.values = _untouched((num_blocks, kv_heads, block_size, v_dim), element)
        self.representatives = _untouched((num_blocks, kv_heads, representative_num, k_dim), element)
        self.lengths = np.zeros(num_blocks, dtype=np.int32)
        self.received = torch.empty(num_blocks, kv_heads, block_size) if keep_received else None
        # The kernels' views of the same memory.
        self.key_array = self.keys.numpy()
        self.value_array = self.values.numpy()
        self.representative_array = self.representatives.numpy()
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._freed: list[int] = []
        self._untouched = 0

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
        return len(self._freed) + self.num_blocks - self._untouched

    def references(self, block: int) -> int:
        """How many sequences hold this block."""
        return int(self._references[block])

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
        self._references[ids] += 1

    def release(self, ids: np.ndarray) -> None:
        """Let go of these blocks; those that nobody holds any more are free again."""
        self._references[ids] -= 1
        self._freed.extend(int(block) for block in ids[::-1] if self._references[block] == 0)


def _untouched(shape: tuple[int, ...], element: np.dtype) -> torch.Tensor:
    """A tensor whose memory the operating system gives as it is written, aligned to cache lines.

    From numpy, which asks for huge pages where torch does not: they read faster.
    """
    size = int(np.prod(shape)) * element.itemsize
    raw = np.empty(size + _CACHE_LINE, dtype=np.uint8)
    skipped = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[skipped : skipped + size].view(element).reshape(shape))
