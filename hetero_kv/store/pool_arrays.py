"""The arrays of a pool: keys and values of blocks in their storage types, and arrays derived from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_kv.cpu_ops.int4_key_scores import bytes_of_block
from hetero_kv.store.key_codes import encode
from hetero_kv.store.memory import reserve
from hetero_kv.store.read_ahead import ReadAhead
from hetero_kv.store.storage import FP16, FP32, StorageType

#: Arrays of a pool that tokens are written to, and arrays that are computed from a block when its contents are final.
WRITTEN = ("keys", "values", "key_offsets")
DERIVED = (
    "representatives", "value_means", "key_codes", "accumulated", "group_representatives", "group_value_means",
)  # fmt: skip
#: The derived arrays by which blocks are chosen and estimated: all blocks' are read at every token.
SCORED = tuple(name for name in DERIVED if name != "accumulated")


class AuxiliaryArray(NamedTuple):
    """An array that a method keeps per block besides keys and values, computed when the block's contents are final.

    Attributes:
        shape: all dimensions but the last, per block and kv head.
        dim: size of the last dimension.
        storage: number format.
    """

    shape: tuple[int, ...]
    dim: int
    storage: StorageType

    @property
    def nbytes(self) -> int:
        """Bytes per block and kv head."""
        return math.prod(self.shape) * self.storage.bytes_per_vector(self.dim)


class PoolArrays:
    """The memory of a fixed number of blocks of one layer; a block stores all kv heads of `block_size` tokens.

    Each array is one large allocation. The operating system backs it with memory as blocks are written, so unused
    capacity costs nothing.

    Args:
        storage: number format of keys, and of values where `value_storage` is None.
        offset_keys: whether keys are stored as differences to `key_offsets`.
        representative_storage: format of representatives and mean values; None for `storage.for_representatives`.
        auxiliary: further arrays per block, by name.

    Attributes:
        keys: [num_blocks, kv_heads, block_size, key_storage.elements(k_dim)] in the storage type's dtype, on the CPU.
        values: [num_blocks, kv_heads, block_size, value_storage.elements(v_dim)], likewise.
        representatives: [num_blocks, kv_heads, representative_num, representative_storage.elements(k_dim)].
        key_array, value_array, representative_array: the kernels' views of the same memory.
        value_means: [num_blocks, kv_heads, 1, representative_storage.elements(v_dim)]; None unless
            `value_means` is set.
        key_codes: [num_blocks, kv_heads, 1, bytes_of_block] uint8, coarse copies of the keys' differences to their
            block's mean (`store.key_codes`); None unless `key_codes` is set.
        group_representatives, group_value_means: the same for groups of consecutive blocks of a sequence, stored at the
            last block of each group; None unless `grouped` is set.
        value_mean_array, key_code_array, group_array, group_value_array: the kernels' views.
        key_offsets: [num_blocks, kv_heads, 1, k_dim] float16, subtracted from a block's keys before they are stored. It
            is the mean of the block's keys if the block is written as a whole, and that of the previous block if it
            fills token by token. None unless `offset_keys` is set.
        offset_array: the kernels' view, [num_blocks, kv_heads, k_dim] uint16.
        accumulated: [num_blocks, kv_heads, block_size] float32, the attention that each key had received from the
            operator's observed queries when its block was finalized; None if no operator observes queries.
        read_ahead: reads blocks that are mapped from a file; None if there are none.
        auxiliary, auxiliary_kernel_arrays: [num_blocks, kv_heads, *shape, storage.elements(dim)] of every
            `AuxiliaryArray`, by name, and the kernels' views of these.
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
        auxiliary: Mapping[str, AuxiliaryArray] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.key_storage, self.value_storage = storage, value_storage or storage
        self.representative_storage = kind = representative_storage or storage.for_representatives
        self.keys, self.key_array = _reserved((num_blocks, kv_heads, block_size), k_dim, storage)
        self.values, self.value_array = _reserved((num_blocks, kv_heads, block_size), v_dim, self.value_storage)
        self.representatives, self.representative_array = _reserved(
            (num_blocks, kv_heads, representative_num), k_dim, kind
        )
        self.value_means: torch.Tensor | None = None
        self.value_mean_array: np.ndarray | None = None
        self.key_codes: torch.Tensor | None = None
        self.key_code_array: np.ndarray | None = None
        if value_means:
            self.value_means, self.value_mean_array = _reserved((num_blocks, kv_heads, 1), v_dim, kind)
        if key_codes:
            memory = reserve(num_blocks * kv_heads * bytes_of_block(block_size, k_dim))
            self.key_code_array = memory.reshape(num_blocks, kv_heads, 1, -1)
            self.key_codes = torch.from_numpy(self.key_code_array)
        self.group_representatives: torch.Tensor | None = None
        self.group_value_means: torch.Tensor | None = None
        self.group_array: np.ndarray | None = None
        self.group_value_array: np.ndarray | None = None
        if grouped:
            shape = num_blocks, kv_heads, representative_num
            self.group_representatives, self.group_array = _reserved(shape, k_dim, kind)
        if grouped and value_means:
            self.group_value_means, self.group_value_array = _reserved((num_blocks, kv_heads, 1), v_dim, kind)
        self.key_offsets, self.offset_array = None, None
        if offset_keys:
            self.key_offsets, offsets = _reserved((num_blocks, kv_heads, 1), k_dim, FP16)
            self.offset_array = offsets[:, :, 0].view(np.uint16)
        self.accumulated: torch.Tensor | None = None
        if accumulates:
            self.accumulated, _ = _reserved((num_blocks, kv_heads), block_size, FP32)
        self.read_ahead: ReadAhead | None = None
        self.auxiliary: dict[str, torch.Tensor] = {}
        self.auxiliary_kernel_arrays: dict[str, np.ndarray] = {}
        for name, each in (auxiliary or {}).items():
            of_pool = num_blocks, kv_heads, *each.shape
            self.auxiliary[name], self.auxiliary_kernel_arrays[name] = _reserved(of_pool, each.dim, each.storage)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Equal for pools whose blocks are stored, and have arrays derived from them, in the same way."""
        storages = self.key_storage, self.value_storage, self.representative_storage
        return *storages, *[(name, each.shape[1:]) for name, each in self.arrays.items()]

    @property
    def bytes_per_block(self) -> int:
        """DRAM that one block takes in all arrays, bytes: keys, values, representatives and other derived arrays."""
        return sum(array[0].numel() * array.element_size() for array in self.arrays.values())

    @property
    def arrays(self) -> dict[str, torch.Tensor]:
        """All arrays of the pool, [num_blocks, ...] each, by attribute name or by the name in `auxiliary`."""
        kept = {name: getattr(self, name) for name in (*WRITTEN, *DERIVED)}
        return {name: array for name, array in kept.items() if array is not None} | self.auxiliary

    def encoded(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns whole blocks [..., kv_heads, block_size, dim], on any device, in their stored form, by array name."""
        made = {}
        if self.key_offsets is not None:
            made["key_offsets"] = offsets = offset_of(keys)
            keys = keys.float() - offsets.float()
        return {**made, "keys": self.key_storage.encode(keys), "values": self.value_storage.encode(values)}

    def decoded(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the keys of blocks that `encoded` made, decoded."""
        keys = self.key_storage.decode(stored["keys"])
        return keys if self.key_offsets is None else keys.float() + stored["key_offsets"].float()

    def derived_of(self, stored: Mapping[str, torch.Tensor], vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the derived arrays [blocks, ...] of stored blocks, by name; `vectors` are their representatives."""
        made = {"representatives": self._represented(vectors)}
        if self.value_means is not None:
            means = self.value_storage.decode(stored["values"]).float().mean(dim=-2, keepdim=True)
            made["value_means"] = self._represented(means)
        if self.key_codes is not None:
            means = self.representative_storage.decode(made["representatives"][..., :1, :]).float()
            made["key_codes"] = encode(self.decoded(stored).float() - means)
        return made

    def put(self, ids: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
        """Set blocks `ids` [blocks] int64 to results of `encoded` and `derived_of`: [blocks, ...] each, on the CPU."""
        for name, contents in arrays.items():
            getattr(self, name)[ids] = contents

    def represent_groups(self, ids: torch.Tensor, combined: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute the representatives and mean values of groups of blocks from those of their blocks.

        ids: [groups, blocks] int64.
        combined: reduces [groups, blocks, kv_heads, representative_num, k_dim] over the blocks.
        """
        assert self.group_representatives is not None
        last, kind = ids[:, -1], self.representative_storage
        vectors = combined(kind.decode(self.representatives[ids]).float())
        self.group_representatives[last] = self._represented(vectors)
        if self.group_value_means is not None:
            assert self.value_means is not None
            self.group_value_means[last] = self._represented(kind.decode(self.value_means[ids]).float().mean(dim=1))

    def _represented(self, vectors: torch.Tensor) -> torch.Tensor:
        # Keys may be of a wider type: numbers beyond this type's range become its largest.
        largest = self.representative_storage.largest
        return self.representative_storage.encode(vectors if largest is None else vectors.clamp(-largest, largest))


def represent_blocks(
    pools: Sequence[PoolArrays], ids: torch.Tensor, represent: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Compute the arrays derived from full blocks, of several pools of one `form` at once.

    ids: [blocks] int64, in every pool.
    represent: keys [blocks, kv_heads, block_size, k_dim] float32 -> representatives [blocks, kv_heads,
        representative_num, k_dim]. With `key_codes`, the first vector must be the mean of the block's keys.
    """
    first = pools[0]
    needed = {"keys": True, "key_offsets": first.key_offsets is not None, "values": first.value_means is not None}
    names = [name for name, is_needed in needed.items() if is_needed]
    stored = {name: torch.cat([getattr(pool, name).index_select(0, ids) for pool in pools]) for name in names}
    for name, made in first.derived_of(stored, represent(first.decoded(stored).float())).items():
        for pool, part in zip(pools, made.split(len(ids)), strict=True):
            getattr(pool, name).index_copy_(0, ids, part)


def offset_of(keys: torch.Tensor) -> torch.Tensor:
    """The mean of keys [..., tokens, dim], stored as [..., 1, dim] float16. Any finite offset would be correct."""
    limit = torch.finfo(torch.float16).max
    return keys.float().mean(dim=-2, keepdim=True).clamp(-limit, limit).half()


def _reserved(shape: tuple[int, ...], dim: int, storage: StorageType) -> tuple[torch.Tensor, np.ndarray]:
    """Allocate `shape` vectors of `dim` numbers; the operating system backs them with memory as they are written.

    The memory consists of whole pages that nothing else uses: a GPU reads it after it has been page-locked, and no page
    can be locked twice.
    """
    memory = reserve(math.prod(shape) * storage.bytes_per_vector(dim))
    as_tensor = torch.from_numpy(memory).view(storage.dtype).reshape(*shape, storage.elements(dim))
    # Not -1, which is ambiguous for vectors without numbers: a pool may store values alone.
    as_array = memory.view(storage.kernel_dtype)
    return as_tensor, as_array.reshape(*shape, storage.bytes_per_vector(dim) // as_array.itemsize)
