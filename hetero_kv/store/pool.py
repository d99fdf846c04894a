"""The blocks of one layer: keys, values and representatives in DRAM."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

from hetero_kv.store.storage import Q4_0, StorageType

#: How `key_codes` are stored.
CODES = Q4_0
# Blocks converted at once: bounds the temporary copy.
_BLOCKS_AT_ONCE = 64


class BlockPool:
    """Fixed number of blocks of `block_size` tokens, each holding all kv heads of one layer.

    One large allocation per array that the operating system backs with memory only as blocks are written,
    so capacity costs nothing until it is used. Which block holds what is the block tables' to know.

    Attributes:
        keys: [num_blocks, kv_heads, block_size, storage.elements(k_dim)] in the storage type's dtype, on the CPU.
        values: [num_blocks, kv_heads, block_size, storage.elements(v_dim)], likewise.
        representatives: [num_blocks, kv_heads, representative_num, k_dim] in `storage.for_representatives`.
        key_array, value_array, representative_array: the kernels' views of the same memory.
        value_means: [num_blocks, kv_heads, 1, v_dim] in `storage.for_representatives`; None where nobody asked for
            them.
        key_codes: [num_blocks, kv_heads, block_size, CODES.elements(k_dim)], how keys differ from their block's mean;
            None where nobody asked for them.
        value_mean_array, key_code_array: the kernels' views.
        accumulated: [num_blocks, kv_heads, block_size] float32, the attention that each key had received from the
            queries that an operator watched when its block got its representatives; None where no operator does.
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
        accumulates: bool = False,
        value_means: bool = False,
        key_codes: bool = False,
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
        self.value_means: torch.Tensor | None = None
        self.value_mean_array: np.ndarray | None = None
        self.key_codes: torch.Tensor | None = None
        self.key_code_array: np.ndarray | None = None
        if value_means:
            self.value_means, self.value_mean_array = _untouched((num_blocks, kv_heads, 1), v_dim, kind)
        if key_codes:
            self.key_codes, self.key_code_array = _untouched((num_blocks, kv_heads, block_size), k_dim, CODES)
        self.accumulated = torch.empty(num_blocks, kv_heads, block_size) if accumulates else None

    @property
    def bytes_per_block(self) -> int:
        """DRAM that one block takes: keys, values, representatives, and what else is kept of it."""
        return sum(array[0].numel() * array.element_size() for array in self._arrays)

    @property
    def _arrays(self) -> list[torch.Tensor]:
        derived = (self.representatives, self.value_means, self.key_codes, self.accumulated)
        arrays = (self.keys, self.values, *derived)
        return [array for array in arrays if array is not None]

    def copy(self, source: int, target: int) -> None:
        """Let block `target` have the contents of block `source`."""
        for array in self._arrays:
            array[target].copy_(array[source])

    def write(self, ids: np.ndarray, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens of a sequence from position `start` on, in its blocks `ids` [blocks] int32.

        Args:
            keys: [kv_heads, tokens, k_dim], any float dtype, on any device.
            values: [kv_heads, tokens, v_dim].
        """
        tokens, written = keys.shape[1], 0
        while written < tokens:
            block, offset = divmod(start + written, self.block_size)
            new_keys, new_values = keys[:, written:], values[:, written:]
            if offset == 0 and tokens - written >= self.block_size:
                written += self._write_full_blocks(ids[block:], new_keys, new_values)
            else:
                count = min(self.block_size - offset, tokens - written)
                self.write_in_block(int(ids[block]), offset, new_keys[:, :count], new_values[:, :count])
                written += count

    def write_in_block(self, block: int, offset: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens [kv_heads, tokens, dim] in one block, from its token `offset` on."""
        stop = offset + keys.shape[1]
        self.storage.write(self.keys[block, :, offset:stop], keys)
        self.storage.write(self.values[block, :, offset:stop], values)

    def derive(self, ids: torch.Tensor) -> None:
        """Compute what is kept of the full blocks `ids` [blocks] int64 beside their representatives.

        Of those the first must be the mean of a block's keys, where there are `key_codes`.
        """
        if self.value_means is not None:
            means = self.storage.decode(self.values[ids]).float().mean(dim=2, keepdim=True)
            self.value_means[ids] = self.storage.for_representatives.encode(means)
        if self.key_codes is not None:
            means = self.storage.for_representatives.decode(self.representatives[ids][:, :, :1]).float()
            self.key_codes[ids] = CODES.encode(self.storage.decode(self.keys[ids]).float() - means)

    def read(self, ids: np.ndarray, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions [start, stop) of a sequence in blocks `ids`, as the storage decodes them.

        Returns [kv_heads, stop - start, dim] each.
        """
        return self.read_keys(ids, start, stop), self._read(self.values, ids, start, stop)

    def read_keys(self, ids: np.ndarray, start: int, stop: int) -> torch.Tensor:
        """As `read`, the keys alone."""
        return self._read(self.keys, ids, start, stop)

    def _read(self, array: torch.Tensor, ids: np.ndarray, start: int, stop: int) -> torch.Tensor:
        first = start // self.block_size
        index = torch.from_numpy(ids[first : -(-stop // self.block_size)].astype(np.int64))
        skipped = start - first * self.block_size
        return self.storage.decode(array[index].transpose(0, 1).flatten(1, 2)[:, skipped : skipped + stop - start])

    def gather(self, ids: np.ndarray, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the first `length` tokens into [kv_heads, length, dim] tensors of any dtype, on any device."""
        step = _BLOCKS_AT_ONCE * self.block_size
        for start in range(0, length, step):
            stop = min(start + step, length)
            for source, target in zip(self.read(ids, start, stop), (keys, values), strict=True):
                target[:, start:stop].copy_(source)

    def _write_full_blocks(self, ids: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Fill whole blocks, `_BLOCKS_AT_ONCE` at most; returns the tokens written."""
        count = min(keys.shape[1] // self.block_size, _BLOCKS_AT_ONCE)
        ids = ids[:count]
        for source, target in ((keys, self.keys), (values, self.values)):
            blocks = source[:, : count * self.block_size].unflatten(1, (count, self.block_size)).transpose(0, 1)
            if int(ids[-1]) - int(ids[0]) == count - 1 and np.all(np.diff(ids) == 1):
                self.storage.write(target[int(ids[0]) : int(ids[0]) + count], blocks)
            else:
                target[torch.from_numpy(ids.astype(np.int64))] = self.storage.encode(blocks).cpu()
        return count * self.block_size


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
