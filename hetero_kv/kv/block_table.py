"""The block table of one sequence in one layer: which pool blocks hold its tokens, in order."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.kv.pool import BlockPool

# Blocks read at once by `gather`: bounds its temporary copy.
_GATHERED_AT_ONCE = 64


class BlockTable:
    """A sequence as a list of pool blocks; all but the last are full.

    Blocks may be shared with other sequences (`fork`); a shared block is copied before it is written to.

    Attributes:
        length: tokens stored.
    """

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self.pool = pool
        self.length = 0
        self._ids = np.empty(-(-capacity // pool.block_size), dtype=np.int32)

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
        """Keys and values of the positions [start, stop): [kv_heads, stop - start, dim] in the storage type."""
        block_size = self.pool.block_size
        first = start // block_size
        ids = torch.from_numpy(self._ids[first : -(-stop // block_size)].astype(np.int64))
        skipped = start - first * block_size
        keys, values = (
            array[ids].transpose(0, 1).flatten(1, 2)[:, skipped : skipped + stop - start]
            for array in (self.pool.keys, self.pool.values)
        )
        return keys, values

    def gather(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all stored tokens into [kv_heads, length, dim] tensors of any dtype, on any device."""
        step = _GATHERED_AT_ONCE * self.pool.block_size
        for start in range(0, self.length, step):
            stop = min(start + step, self.length)
            for source, target in zip(self.read(start, stop), (keys, values), strict=True):
                target[:, start:stop].copy_(source)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        kept = -(-length // self.pool.block_size)
        self.pool.release(self._ids[kept : self.num_blocks])
        self.length = length
        if length % self.pool.block_size:
            self._own_last_block()
            self.pool.lengths[self._ids[kept - 1]] = length % self.pool.block_size

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
        self._ids[held:needed] = self.pool.allocate(needed - held)
        if self.length % self.pool.block_size:
            self._own_last_block()

    def _own_last_block(self) -> None:
        """Replace a last block that others hold too by a copy of it: its length is about to change."""
        last = self.ids[-1:].copy()
        if self.pool.references(int(last[0])) == 1:
            return
        copy = int(self.pool.allocate(1)[0])
        for array in (self.pool.keys, self.pool.values, self.pool.received):
            if array is not None:
                array[copy].copy_(array[int(last[0])])
        self.pool.lengths[copy] = self.pool.lengths[last[0]]
        self._ids[self.num_blocks - 1] = copy
        self.pool.release(last)

    def _write_full_blocks(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        block_size = self.pool.block_size
        count = keys.shape[1] // block_size
        ids = self._ids[block : block + count]
        for source, target in ((keys, self.pool.keys), (values, self.pool.values)):
            blocks = source[:, : count * block_size].unflatten(1, (count, block_size)).transpose(0, 1)
            if int(ids[-1]) - int(ids[0]) == count - 1 and np.all(np.diff(ids) == 1):
                target[int(ids[0]) : int(ids[0]) + count].copy_(blocks)
            else:
                target[torch.from_numpy(ids.astype(np.int64))] = blocks.to("cpu", target.dtype)
        self.pool.lengths[ids] = block_size
        self.length += count * block_size
        return count * block_size

    def _write_in_block(self, block: int, offset: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        count = min(self.pool.block_size - offset, keys.shape[1])
        block_id = int(self._ids[block])
        self.pool.keys[block_id, :, offset : offset + count].copy_(keys[:, :count])
        self.pool.values[block_id, :, offset : offset + count].copy_(values[:, :count])
        self.pool.lengths[block_id] = offset + count
        self.length += count
        return count
