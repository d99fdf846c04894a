"""A layer's Context on a GPU: the representatives of all blocks, and slots for the chosen ones.

Blocks that are chosen again stay in their slots; a kernel reads the others from page-locked DRAM (as ShadowKV does,
arXiv:2410.21465, section 4.2). The host takes no part in it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.gpu_ops.block_choice import best_blocks, block_scores
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.resident_attention import CONTEXT, attend
from hetero_kv.gpu_ops.resident_slots import NONE, fetch, placed
from hetero_kv.gpu_ops.slot_formats import Slots, as_words
from hetero_kv.gpu_ops.window_step import join_parts
from hetero_kv.store.pool import BlockPool


class ResidentChoice(NamedTuple):
    """How a layer chooses blocks on the GPU.

    Attributes:
        blocks: the most Context blocks of a kv head.
        bounds, largest, is_shared: see `gpu_ops.block_choice`.
    """

    blocks: int
    bounds: bool
    largest: bool
    is_shared: bool


class SentToken(NamedTuple):
    """What a layer sends to the CPU of a decoded token; contiguous.

    Attributes:
        key, value: [batch, kv_heads, 1, dim] float32.
        missed: [batch * kv_heads] int32, blocks of each kv head that were read from DRAM.
    """

    key: torch.Tensor
    value: torch.Tensor
    missed: torch.Tensor


class ResidentContext:
    """Memory of one layer, of a fixed size, so that a captured token finds it where it was.

    Args:
        choice: how blocks are chosen.
        pool: the layer's blocks in DRAM.
        capacity: the most blocks of a sequence.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    def __init__(
        self, choice: ResidentChoice, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        self.choice = choice
        (batch, kv_heads), count = like_keys.shape[:2], min(choice.blocks, capacity)
        represented = pool.representatives
        # Block by block, so that new ones arrive in one copy; none where nothing is chosen.
        of_index = (capacity if count else 0, batch, kv_heads, *represented.shape[2:])
        self._vectors = represented.new_zeros(of_index, device=like_keys.device)
        self._ids = torch.full((batch, kv_heads, count), NONE, device=like_keys.device)
        self._slots = _slots(pool, (batch, kv_heads, count), like_keys, like_values)
        #: Blocks of the Context whose representatives are here.
        self._indexed = 0

    def take_in(self, pool: BlockPool, context: Sequence[np.ndarray] | np.ndarray) -> None:
        """Send representatives of the blocks that have entered the Context since the last call.

        context: the Context's blocks in the pool, for each row.
        """
        first, end = self._indexed, len(context[0])
        if first < end and len(self._vectors):
            ids = torch.from_numpy(np.stack([row[first:end] for row in context], axis=1).astype(np.int64))
            self._vectors[first:end].copy_(pool.representatives[ids].pin_memory(), non_blocking=True)
        self._indexed = end

    def take_computed(self, first: int, vectors: torch.Tensor) -> None:
        """Take the representatives of blocks from the Context's block `first` on, if they follow those that are here.

        vectors: [batch, blocks, kv_heads, representative_num, k_dim], as the pool stores them, on the device.
        """
        end = first + vectors.shape[1]
        if first == self._indexed and len(self._vectors):
            self._vectors[first:end].copy_(vectors.transpose(0, 1))
            self._indexed = end

    @property
    def ids(self) -> torch.Tensor:
        """The block in each slot, [batch, kv_heads, n] int64; negative for none."""
        return self._ids

    def fill(self, pool: BlockPool, context: Sequence[np.ndarray], ids: torch.Tensor) -> None:
        """Load blocks into the slots.

        Args:
            context: as for `take_in`.
            ids: as `ids`, on the CPU.
        """
        device, heads = self._ids.device, torch.arange(ids.shape[1])[:, None]
        for row, blocks in enumerate(context):
            if len(blocks):
                stored = torch.from_numpy(blocks.astype(np.int64))[ids[row].clamp(min=0)]
                for array, slots in zip(fetched_arrays(pool), self._parts, strict=True):
                    slots[row].copy_(on_device(array[stored, heads], device))
        self._ids.copy_(on_device(ids, device))

    def shorten(self, context: int) -> None:
        """Forget all but the first `context` blocks of the Context."""
        if context < self._indexed:
            self._indexed = context
            self._ids.masked_fill_(self._ids >= context, NONE)

    def empty_slots(self) -> None:
        """Forget what slots have: a token that failed may have named blocks that did not arrive."""
        self._ids.fill_(NONE)

    def attended(
        self, call: AttentionCall, window: DeviceWindow, pool: BlockPool, numbers: torch.Tensor, table: torch.Tensor,
        sent: SentToken,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """A decoded token's attention to its window and its best blocks, after `take_in`; kernels alone.

        Args:
            numbers: see `gpu_ops.resident_attention`.
            table: [batch, capacity] int32, the Context's blocks in the pool, on the device.
            sent: is written.

        Returns out [batch, heads, 1, v_dim] in the model's dtype, and its log-sum-exp [batch, heads, 1].
        """
        if self._ids.shape[2]:
            self._load_best(call, pool, numbers[CONTEXT:], table, sent.missed)
        places = (window.keys, window.values), window.initial, self._ids, self._slots, numbers
        parts, logarithms = attend(call.q, call.k, call.v, *places, call.scale, call.softcap, (sent.key, sent.value))
        out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        join_parts(parts, logarithms, None, None, out, lse)
        return out, lse

    def _load_best(
        self, call: AttentionCall, pool: BlockPool, count: torch.Tensor, table: torch.Tensor, missed: torch.Tensor
    ) -> None:
        choice, vectors = self.choice, self._vectors.permute(1, 2, 0, 3, 4)
        # As on the CPU the representatives' products count as they are.
        scores = block_scores(call.q, vectors, count, choice.bounds, 1.0)
        chosen = best_blocks(scores, count, self._ids.shape[2], choice.largest, is_shared=choice.is_shared)
        after, misses, into = placed(self._ids, chosen, missed)
        self._ids.copy_(after)
        for stored, slots in zip(fetched_arrays(pool), self._parts, strict=True):
            fetch(as_words(stored), table, misses, into, as_words(slots))

    @property
    def _parts(self) -> list[torch.Tensor]:
        """The slots of each of `fetched_arrays`."""
        return [part for part in self._slots if part is not None]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in (self._vectors, self._ids, *self._parts))

    def selected(self, rows: list[int]) -> ResidentContext:
        """New memory, whose row i is a copy of row `rows[i]`."""
        new = copy.copy(self)
        # Slices, because indexing with a list would copy it to the device, and the host would wait for that.
        new._vectors = torch.cat([self._vectors[:, row : row + 1] for row in rows], dim=1)
        new._ids, *slots = (torch.cat([part[row : row + 1] for row in rows]) for part in (self._ids, *self._parts))
        new._slots = Slots(*slots)
        return new


def fetched_arrays(pool: BlockPool) -> list[torch.Tensor]:
    """What a GPU reads of a block: keys, values, and the offset of keys that have one."""
    return [array for array in (pool.keys, pool.values, pool.key_offsets) if array is not None]


def _slots(pool: BlockPool, shape: tuple[int, int, int], like_keys: torch.Tensor, like_values: torch.Tensor) -> Slots:
    """Empty slots: plain numbers in the model's dtype, packed ones and key offsets as they are stored."""

    def memory(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return like_keys.new_zeros(*shape, *stored.shape[2:], dtype=dtype)

    offsets = pool.key_offsets
    return Slots(
        memory(pool.keys, like_keys.dtype if pool.key_storage.is_plain else pool.keys.dtype),
        memory(pool.values, like_values.dtype if pool.value_storage.is_plain else pool.values.dtype),
        None if offsets is None else memory(offsets, offsets.dtype),
    )
