"""The block table of one sequence in one layer: which pool blocks hold its tokens, in order."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.store.pool import BlockPool

# Blocks converted at once: bounds the temporary copy.
_BLOCKS_AT_ONCE = 64


class BlockTable:
    """A sequence as a list of pool blocks; all but the last are full.

    Blocks may be shared with other sequences (`fork`); a shared block is copied before it is written to. A table that
    is dropped lets go of its blocks.

    Attributes:
        length: tokens stored.
    """

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self.pool = pool
        self.length = 0
        self._ids = np.empty(-(-capacity // pool.block_size), dtype=np.int32)

    def __del__(self) -> None:
        if self.length:
            self.pool.abandon(self.ids)

    @property
    def num_blocks(self) -> int:
        """Blocks in use, the partial one included."""
        return -(-self.length // self.pool.block_size)

    @property
    def ids(self) -> np.ndarray:
        """Pool ids of the blocks in use, [num_blocks] int32, a view."""
        return self._ids[: self.num_blocks]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens after the last one.

        Args:
            keys: [kv_heads, tokens, k_dim], any float dtype, on any device.
            values: [kv_heads, tokens, v_dim].

        Raises MemoryError when the pool is full; nothing is stored then.
        """
        tokens = keys.shape[1]
        self._reserve(tokens)
        written = 0
        while written < tokens:
            block, offset = divmod(self.length, self.pool.block_size)
            if offset == 0 and tokens - written >= self.pool.block_size:
                written += self._write_full_blocks(block, keys[:, written:], values[:, written:])
            else:
                written += self._write_in_block(block, offset, keys[:, written:], values[:, written:])

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions [start, stop): [kv_heads, stop - start, dim] as the storage decodes."""
        block_size = self.pool.block_size
        first = start // block_size
        ids = torch.from_numpy(self._ids[first : -(-stop // block_size)].astype(np.int64))
        skipped = start - first * block_size
        keys, values = (
            self.pool.storage.decode(array[ids].transpose(0, 1).flatten(1, 2)[:, skipped : skipped + stop - start])
            for array in (self.pool.keys, self.pool.values)
        )
        return keys, values

    def gather(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all stored tokens into [kv_heads, length, dim] tensors of any dtype, on any device."""
        step = _BLOCKS_AT_ONCE * self.pool.block_size
        for start in range(0, self.length, step):
            stop = min(start + step, self.length)
            for source, target in zip(self.read(start, stop), (keys, values), strict=True):
                target[:, start:stop].copy_(source)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        kept = -(-length // self.pool.block_size)
        self.pool.release(self._ids[kept : self.num_blocks])
        self.length = length
        last = self.ids[-1:]
        # A block that others still hold in full is copied when something is appended.
        if length % self.pool.block_size and self.pool.references(int(last[0])) == 1:
            self._shorten(int(last[0]))

    def fork(self) -> BlockTable:
        """A second sequence with the same tokens, sharing the blocks."""
        twin = BlockTable(self.pool, 0)
        twin._ids = self._ids.copy()
        twin.length = self.length
        self.pool.retain(twin.ids)
        return twin

    def free(self) -> None:
        """Let go of every block."""
        self.truncate(0)

    def _reserve(self, tokens: int) -> None:
        """Allocate the blocks that `tokens` more tokens need, and own the one that is written into."""
        held = self.num_blocks
        needed = -(-(self.length + tokens) // self.pool.block_size)
        if self.length % self.pool.block_size:
            self.own(held - 1, held)
            last = int(self._ids[held - 1])
            if self.pool.lengths[last] != self.length % self.pool.block_size:
                self._shorten(last)
        self._ids[held:needed] = self.pool.allocate(needed - held)

    def own(self, first: int, stop: int) -> None:
        """Replace those of the blocks [first, stop) that others hold too by copies: they are about to be written to.

        Raises MemoryError when the pool is full (`BlockPool.copies_to_own`); the blocks before are copied then.
        """
        pool = self.pool
        for index in range(first, stop):
            shared = self._ids[index : index + 1].copy()
            if pool.references(int(shared[0])) == 1:
                continue
            copy = pool.allocate(1)
            for array in (pool.keys, pool.values, pool.representatives, pool.received):
                if array is not None:
                    array[int(copy[0])].copy_(array[int(shared[0])])
            pool.lengths[copy] = pool.lengths[shared]
            self._ids[index] = copy[0]
            pool.release(shared)

    def _shorten(self, last: int) -> None:
        """Forget what stands in the last block, the table's own, behind the table's length."""
        kept = self.length % self.pool.block_size
        self.pool.lengths[last] = kept
        if self.pool.received is not None:
            self.pool.received[last, :, kept:] = 0

    def _write_full_blocks(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        block_size = self.pool.block_size
        count = min(keys.shape[1] // block_size, _BLOCKS_AT_ONCE)
        ids = self._ids[block : block + count]
        for source, target in ((keys, self.pool.keys), (values, self.pool.values)):
            blocks = source[:, : count * block_size].unflatten(1, (count, block_size)).transpose(0, 1)
            if int(ids[-1]) - int(ids[0]) == count - 1 and np.all(np.diff(ids) == 1):
                self.pool.storage.write(target[int(ids[0]) : int(ids[0]) + count], blocks)
            else:
                target[torch.from_numpy(ids.astype(np.int64))] = self.pool.storage.encode(blocks).cpu()
        self.pool.lengths[ids] = block_size
        self.length += count * block_size
        return count * block_size

    def _write_in_block(self, block: int, offset: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        count = min(self.pool.block_size - offset, keys.shape[1])
        block_id = int(self._ids[block])
        for source, target in ((keys, self.pool.keys), (values, self.pool.values)):
            self.pool.storage.write(target[block_id, :, offset : offset + count], source[:, :count])
        self.pool.lengths[block_id] = offset + count
        self.length += count
        return count
