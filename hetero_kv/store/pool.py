"""The blocks of one layer: keys, values and representatives in DRAM."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.cpu_ops.token_store import store_tokens
from hetero_kv.store.pool_arrays import WRITTEN, PoolArrays, offset_of
from hetero_kv.store.read_ahead import ReadAhead

# Blocks converted per copy; this bounds the temporary memory.
_BLOCKS_AT_ONCE = 64


class BlockPool(PoolArrays):
    """A fixed number of blocks of `block_size` tokens of one layer; writes and reads the tokens of sequences.

    Block tables know which sequence a block belongs to.
    """

    def is_in_file(self, start: int, stop: int) -> None:
        """Record that the pages of blocks [start, stop) are mapped from a file."""
        if self.read_ahead is None:
            read = [array for name in WRITTEN if (array := self.arrays.get(name)) is not None and array[0].numel()]
            self.read_ahead = ReadAhead(read, self.num_blocks)
        self.read_ahead.add(start, stop)

    def reads_ahead(self) -> bool:
        """Whether blocks of a file may be outside memory. Call it once a step."""
        return self.read_ahead is not None and self.read_ahead.is_worth_it()

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of block `source` to block `target`."""
        for array in self.arrays.values():
            array[target].copy_(array[source])

    def write(self, ids: np.ndarray, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a sequence's tokens from position `start` on, in its blocks `ids` [blocks] int32.

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
                self._write_in_block(ids, block, offset, new_keys[:, :count], new_values[:, :count])
                written += count

    def write_few(self, ids: np.ndarray, start: int, keys: torch.Tensor, values: torch.Tensor) -> float:
        """As `write` of few tokens on the CPU, for types that `token_store.stores` accepts, and keys without offsets.

        Returns the largest magnitude (`token_store.store_token`).
        """
        tokens, first = keys.shape[1], start // self.block_size
        own = ids[first : (start + tokens - 1) // self.block_size + 1]
        positions = np.arange(start, start + tokens) - first * self.block_size
        new_keys, new_values = (each.transpose(0, 1).float().contiguous().numpy() for each in (keys, values))
        table = own[None].repeat(tokens, axis=0)
        return store_tokens(new_keys, new_values, self.key_array, self.value_array, table, positions)

    def decoded_keys(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the keys of blocks as they were before storage, [blocks, kv_heads, block_size, k_dim] of a float
        dtype."""
        return self.decoded({name: self.arrays[name][ids] for name in ("keys", "key_offsets") if name in self.arrays})

    def _write_in_block(
        self, ids: np.ndarray, index: int, offset: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store tokens [kv_heads, tokens, dim] in block `ids[index]`, from the block's token `offset` on."""
        block, stop = int(ids[index]), offset + keys.shape[1]
        if self.key_offsets is not None:
            if offset == 0:
                nearest = self.decoded_keys(torch.tensor([int(ids[index - 1])]))[0] if index else keys
                self.key_offsets[block] = offset_of(nearest).cpu()
            keys = keys.float() - self.key_offsets[block].to(keys.device, torch.float32)
        self.key_storage.write(self.keys[block, :, offset:stop], keys)
        self.value_storage.write(self.values[block, :, offset:stop], values)

    def read(self, ids: np.ndarray, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of a sequence's positions [start, stop), decoded; `ids` are the sequence's blocks.

        Shapes: [kv_heads, stop - start, dim] each.
        """
        first, last, part = self._place(start, stop)
        index = torch.from_numpy(ids[first:last].astype(np.int64))
        values = self.value_storage.decode(self.values[index].transpose(0, 1).flatten(1, 2)[:, part])
        return self.read_keys(ids, start, stop), values

    def read_keys(self, ids: np.ndarray, start: int, stop: int) -> torch.Tensor:
        """Returns the keys of a sequence's positions [start, stop), as `read` does."""
        first, last, part = self._place(start, stop)
        index = torch.from_numpy(ids[first:last].astype(np.int64))
        keys = self.key_storage.decode(self.keys[index].transpose(0, 1).flatten(1, 2)[:, part])
        if self.key_offsets is None:
            return keys
        offsets = self.key_offsets[index].float().transpose(0, 1).repeat_interleave(self.block_size, dim=1).squeeze(2)
        return keys.float() + offsets[:, part]

    def _place(self, start: int, stop: int) -> tuple[int, int, slice]:
        """Returns the sequence's blocks [first, last) that cover positions [start, stop), and the slice in them."""
        first = start // self.block_size
        skipped = start - first * self.block_size
        return first, -(-stop // self.block_size), slice(skipped, skipped + stop - start)

    def gather(self, ids: np.ndarray, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the first `length` tokens into [kv_heads, length, dim] tensors of any dtype, on any device."""
        step = _BLOCKS_AT_ONCE * self.block_size
        for start in range(0, length, step):
            stop = min(start + step, length)
            for source, target in zip(self.read(ids, start, stop), (keys, values), strict=True):
                target[:, start:stop].copy_(source)

    def _write_full_blocks(self, ids: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Fill whole blocks, at most `_BLOCKS_AT_ONCE`. Returns the number of tokens written."""
        count = min(keys.shape[1] // self.block_size, _BLOCKS_AT_ONCE)
        ids = ids[:count]
        keys, values = (
            source[:, : count * self.block_size].unflatten(1, (count, self.block_size)).transpose(0, 1)
            for source in (keys, values)
        )
        if self.key_offsets is not None:
            offsets = offset_of(keys)
            self.key_offsets[torch.from_numpy(ids.astype(np.int64))] = offsets.cpu()
            keys = keys.float() - offsets.float()
        parts = (keys, self.keys, self.key_storage), (values, self.values, self.value_storage)
        for blocks, target, storage in parts:
            if int(ids[-1]) - int(ids[0]) == count - 1 and np.all(np.diff(ids) == 1):
                storage.write(target[int(ids[0]) : int(ids[0]) + count], blocks)
            else:
                target[torch.from_numpy(ids.astype(np.int64))] = storage.encode(blocks).cpu()
        return count * self.block_size
