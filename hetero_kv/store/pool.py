"""The blocks of one layer: keys, values and representatives in DRAM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from cpu_ops.code_masses import bytes_of_block
from hetero_kv.store.key_codes import encode
from hetero_kv.store.memory import untouched
from hetero_kv.store.read_ahead import ReadAhead
from hetero_kv.store.storage import FP16, FP32, StorageType

#: Arrays of a pool that tokens are written to, and those that are made of a block when its contents are final.
WRITTEN = ("keys", "values", "key_offsets")
DERIVED = (
    "representatives", "value_means", "key_codes", "accumulated", "group_representatives", "group_value_means",
)  # fmt: skip
#: Of these, what blocks are chosen and estimated by, of all of them at every token.
SCORED = tuple(name for name in DERIVED if name != "accumulated")
# Blocks converted at once: bounds the temporary copy.
_BLOCKS_AT_ONCE = 64


class Beside(NamedTuple):
    """An array that a method keeps of blocks beside the tokens, made when a block's contents are final.

    Attributes:
        shape: of a block and kv head, all dimensions but the last.
        dim: numbers of the last one.
        storage: their format.
    """

    shape: tuple[int, ...]
    dim: int
    storage: StorageType

    @property
    def nbytes(self) -> int:
        """Bytes of a block and kv head."""
        return math.prod(self.shape) * self.storage.bytes_per_vector(self.dim)


class BlockPool:
    """Fixed number of blocks of `block_size` tokens, each holding all kv heads of one layer.

    One large allocation per array that the operating system backs with memory only as blocks are written,
    so capacity costs nothing until it is used. Which block holds what is the block tables' to know.

    Args:
        storage: number format of keys, and of values where `value_storage` is None.
        offset_keys: whether keys are stored as they differ from `key_offsets`.
        representative_storage: of representatives and mean values; None for that which `storage` has for them.
        beside: what else a method keeps of blocks, by names of its own.

    Attributes:
        keys: [num_blocks, kv_heads, block_size, key_storage.elements(k_dim)] in the storage type's dtype, on the CPU.
        values: [num_blocks, kv_heads, block_size, value_storage.elements(v_dim)], likewise.
        representatives: [num_blocks, kv_heads, representative_num, representative_storage.elements(k_dim)].
        key_array, value_array, representative_array: the kernels' views of the same memory.
        value_means: [num_blocks, kv_heads, 1, representative_storage.elements(v_dim)]; None where nobody asked for
            them.
        key_codes: [num_blocks, kv_heads, 1, bytes_of_block] uint8, how keys differ from their block's mean
            (`store.key_codes`); None where nobody asked for them.
        group_representatives, group_value_means: of groups of consecutive blocks of a sequence, as of blocks, where the
            last block of each group lies; None where nobody asked for them.
        value_mean_array, key_code_array, group_array, group_value_array: the kernels' views.
        key_offsets: [num_blocks, kv_heads, 1, k_dim] float16, what was taken off the keys of a block before they were
            stored: the mean of those of a block that is written as a whole, of the block before it where it fills
            token by token; None where keys are stored as they are.
        offset_array: the kernels' view, [num_blocks, kv_heads, k_dim] uint16.
        accumulated: [num_blocks, kv_heads, block_size] float32, the attention that each key had received from the
            queries that an operator watched when its block got its representatives; None where no operator does.
        read_ahead: of blocks that lie in a file; None where none do.
        beside, beside_arrays: [num_blocks, kv_heads, *shape, storage.elements(dim)] of every `Beside`, by name, and the
            kernels' views.
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
        grouped: bool = False,
        *,
        value_storage: StorageType | None = None,
        offset_keys: bool = False,
        representative_storage: StorageType | None = None,
        beside: Mapping[str, Beside] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.key_storage, self.value_storage = storage, value_storage or storage
        self.representative_storage = kind = representative_storage or storage.for_representatives
        self.keys, self.key_array = _untouched((num_blocks, kv_heads, block_size), k_dim, storage)
        self.values, self.value_array = _untouched((num_blocks, kv_heads, block_size), v_dim, self.value_storage)
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
            memory = untouched(num_blocks * kv_heads * bytes_of_block(block_size, k_dim))
            self.key_code_array = memory.reshape(num_blocks, kv_heads, 1, -1)
            self.key_codes = torch.from_numpy(self.key_code_array)
        self.group_representatives: torch.Tensor | None = None
        self.group_value_means: torch.Tensor | None = None
        self.group_array: np.ndarray | None = None
        self.group_value_array: np.ndarray | None = None
        if grouped:
            shape = num_blocks, kv_heads, representative_num
            self.group_representatives, self.group_array = _untouched(shape, k_dim, kind)
        if grouped and value_means:
            self.group_value_means, self.group_value_array = _untouched((num_blocks, kv_heads, 1), v_dim, kind)
        self.key_offsets, self.offset_array = None, None
        if offset_keys:
            self.key_offsets, offsets = _untouched((num_blocks, kv_heads, 1), k_dim, FP16)
            self.offset_array = offsets[:, :, 0].view(np.uint16)
        self.accumulated: torch.Tensor | None = None
        if accumulates:
            self.accumulated, _ = _untouched((num_blocks, kv_heads), block_size, FP32)
        self.read_ahead: ReadAhead | None = None
        self.beside: dict[str, torch.Tensor] = {}
        self.beside_arrays: dict[str, np.ndarray] = {}
        for name, each in (beside or {}).items():
            of_pool = num_blocks, kv_heads, *each.shape
            self.beside[name], self.beside_arrays[name] = _untouched(of_pool, each.dim, each.storage)

    @property
    def bytes_per_block(self) -> int:
        """DRAM that one block takes: keys, values, representatives, and what else is kept of it."""
        return sum(array[0].numel() * array.element_size() for array in self.arrays.values())

    @property
    def arrays(self) -> dict[str, torch.Tensor]:
        """Everything that is kept of blocks, by the attribute's name, or its own: [num_blocks, ...] each."""
        kept = {name: getattr(self, name) for name in (*WRITTEN, *DERIVED)}
        return {name: array for name, array in kept.items() if array is not None} | self.beside

    def lies_in_file(self, start: int, stop: int) -> None:
        """Pages of blocks [start, stop) are mapped from a file."""
        if self.read_ahead is None:
            read = [array for name in WRITTEN if (array := self.arrays.get(name)) is not None and array[0].numel()]
            self.read_ahead = ReadAhead(read, self.num_blocks)
        self.read_ahead.add(start, stop)

    def reads_ahead(self) -> bool:
        """Whether there may be blocks in a file that are not in memory; to be asked once a step."""
        return self.read_ahead is not None and self.read_ahead.is_worth_it()

    def copy(self, source: int, target: int) -> None:
        """Let block `target` have the contents of block `source`."""
        for array in self.arrays.values():
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
                self._write_in_block(ids, block, offset, new_keys[:, :count], new_values[:, :count])
                written += count

    def decoded_keys(self, ids: torch.Tensor) -> torch.Tensor:
        """The keys of blocks, as they were before they were stored: [blocks, kv_heads, block_size, k_dim] of a float
        dtype."""
        return self.decoded({name: self.arrays[name][ids] for name in ("keys", "key_offsets") if name in self.arrays})

    def _write_in_block(
        self, ids: np.ndarray, index: int, offset: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store tokens [kv_heads, tokens, dim] in block `ids[index]`, from its token `offset` on."""
        block, stop = int(ids[index]), offset + keys.shape[1]
        if self.key_offsets is not None:
            if offset == 0:
                nearest = self.decoded_keys(torch.tensor([int(ids[index - 1])]))[0] if index else keys
                self.key_offsets[block] = _offset(nearest).cpu()
            keys = keys.float() - self.key_offsets[block].to(keys.device, torch.float32)
        self.key_storage.write(self.keys[block, :, offset:stop], keys)
        self.value_storage.write(self.values[block, :, offset:stop], values)

    def represent(self, ids: torch.Tensor, vectors: torch.Tensor) -> None:
        """Let `vectors` [blocks, kv_heads, representative_num, k_dim] stand for the full blocks `ids` [blocks] int64.

        And compute what else is kept of them. The first vector must be the mean of a block's keys where there are
        `key_codes`.
        """
        wanted: tuple[str, ...] = () if self.key_codes is None else ("keys", "key_offsets")
        wanted += () if self.value_means is None else ("values",)
        stored = {name: array[ids] for name, array in self.arrays.items() if name in wanted}
        self.put(ids, self.derived_of(stored, vectors))

    def encoded(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whole blocks [..., kv_heads, block_size, dim], on any device, as they are stored: by the arrays' names."""
        made = {}
        if self.key_offsets is not None:
            made["key_offsets"] = offsets = _offset(keys)
            keys = keys.float() - offsets.float()
        return {**made, "keys": self.key_storage.encode(keys), "values": self.value_storage.encode(values)}

    def decoded(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The keys of blocks that `encoded` made, as they come back from where they are stored."""
        keys = self.key_storage.decode(stored["keys"])
        return keys if self.key_offsets is None else keys.float() + stored["key_offsets"].float()

    def derived_of(self, stored: Mapping[str, torch.Tensor], vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is kept of such blocks [blocks, ...] beside, by name, with the `vectors` that are to stand for them."""
        made = {"representatives": self._represented(vectors)}
        if self.value_means is not None:
            means = self.value_storage.decode(stored["values"]).float().mean(dim=-2, keepdim=True)
            made["value_means"] = self._represented(means)
        if self.key_codes is not None:
            means = self.representative_storage.decode(made["representatives"][..., :1, :]).float()
            made["key_codes"] = encode(self.decoded(stored).float() - means)
        return made

    def put(self, ids: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
        """Let blocks `ids` [blocks] int64 have what `encoded` and `derived_of` made: [blocks, ...] each, on the CPU."""
        for name, contents in arrays.items():
            getattr(self, name)[ids] = contents

    def represent_groups(self, ids: torch.Tensor, combined: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute what stands for groups of blocks `ids` [groups, blocks] int64 from what stands for each block.

        combined: [groups, blocks, kv_heads, representative_num, k_dim] to the same without blocks.
        """
        assert self.group_representatives is not None
        last, kind = ids[:, -1], self.representative_storage
        vectors = combined(kind.decode(self.representatives[ids]).float())
        self.group_representatives[last] = self._represented(vectors)
        if self.group_value_means is not None:
            assert self.value_means is not None
            self.group_value_means[last] = self._represented(kind.decode(self.value_means[ids]).float().mean(dim=1))

    def _represented(self, vectors: torch.Tensor) -> torch.Tensor:
        # A number beyond the type's range, of keys in a wider one, is still the largest there is.
        largest = self.representative_storage.largest
        return self.representative_storage.encode(vectors if largest is None else vectors.clamp(-largest, largest))

    def read(self, ids: np.ndarray, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions [start, stop) of a sequence in blocks `ids`, as the storages decode them.

        Returns [kv_heads, stop - start, dim] each.
        """
        first, last, part = self._place(start, stop)
        index = torch.from_numpy(ids[first:last].astype(np.int64))
        values = self.value_storage.decode(self.values[index].transpose(0, 1).flatten(1, 2)[:, part])
        return self.read_keys(ids, start, stop), values

    def read_keys(self, ids: np.ndarray, start: int, stop: int) -> torch.Tensor:
        """As `read`, the keys alone."""
        first, last, part = self._place(start, stop)
        index = torch.from_numpy(ids[first:last].astype(np.int64))
        keys = self.key_storage.decode(self.keys[index].transpose(0, 1).flatten(1, 2)[:, part])
        if self.key_offsets is None:
            return keys
        offsets = self.key_offsets[index].float().transpose(0, 1).repeat_interleave(self.block_size, dim=1).squeeze(2)
        return keys.float() + offsets[:, part]

    def _place(self, start: int, stop: int) -> tuple[int, int, slice]:
        """The blocks [first, last) of a sequence that hold the positions [start, stop), and where these are in them."""
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
        """Fill whole blocks, `_BLOCKS_AT_ONCE` at most; returns the tokens written."""
        count = min(keys.shape[1] // self.block_size, _BLOCKS_AT_ONCE)
        ids = ids[:count]
        keys, values = (
            source[:, : count * self.block_size].unflatten(1, (count, self.block_size)).transpose(0, 1)
            for source in (keys, values)
        )
        if self.key_offsets is not None:
            offsets = _offset(keys)
            self.key_offsets[torch.from_numpy(ids.astype(np.int64))] = offsets.cpu()
            keys = keys.float() - offsets.float()
        parts = (keys, self.keys, self.key_storage), (values, self.values, self.value_storage)
        for blocks, target, storage in parts:
            if int(ids[-1]) - int(ids[0]) == count - 1 and np.all(np.diff(ids) == 1):
                storage.write(target[int(ids[0]) : int(ids[0]) + count], blocks)
            else:
                target[torch.from_numpy(ids.astype(np.int64))] = storage.encode(blocks).cpu()
        return count * self.block_size


def _offset(keys: torch.Tensor) -> torch.Tensor:
    """The mean of keys [..., tokens, dim] as it is stored: [..., 1, dim] float16. Any number is right, if it is one."""
    limit = torch.finfo(torch.float16).max
    return keys.float().mean(dim=-2, keepdim=True).clamp(-limit, limit).half()


def _untouched(shape: tuple[int, ...], dim: int, storage: StorageType) -> tuple[torch.Tensor, np.ndarray]:
    """Room for `shape` vectors of `dim` numbers, that the operating system gives as it is written; page-aligned.

    Whole pages of its own: a GPU reads it after they have been page-locked, and no page can be locked twice.
    """
    memory = untouched(math.prod(shape) * storage.bytes_per_vector(dim))
    as_tensor = torch.from_numpy(memory).view(storage.dtype).reshape(*shape, storage.elements(dim))
    # Not -1, which is ambiguous for vectors of no numbers: a pool may hold values alone.
    as_array = memory.view(storage.kernel_dtype)
    return as_tensor, as_array.reshape(*shape, storage.bytes_per_vector(dim) // as_array.itemsize)
