"""A layer's Context on a GPU: the representatives of all blocks, and slots for the chosen ones.

Blocks that are chosen again stay in their slots; a kernel reads the others from page-locked DRAM (as ShadowKV does,
arXiv:2410.21465, section 4.2). The host takes no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, CHOSEN
from hetero_kv.families.retrieval.block_index import BlockIndex
from hetero_kv.families.retrieval.device_context import (
    CpuTurn,
    DeviceContext,
    LayerMemory,
    SentToken,
    fetched_arrays,
)
from hetero_kv.families.retrieval.step_counts import DecodedGroups, StepCounts
from hetero_kv.gpu_ops.block_choice import best_blocks, block_scores
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.resident_attention import CONTEXT, attend
from hetero_kv.gpu_ops.resident_slots import NONE, fetch, placed
from hetero_kv.gpu_ops.row_memory import AnyMemory
from hetero_kv.gpu_ops.slot_formats import Slots, as_words
from hetero_kv.gpu_ops.window_step import join_parts
from hetero_kv.store.pool import BlockPool


class ResidentChoice(NamedTuple):
    """How a layer chooses blocks on the GPU.

    Attributes:
        blocks: the most Context blocks of a kv head.
        bounds, largest, is_shared: see `gpu_ops.block_choice`.
        heads: query heads whose queries go to the CPU, because representatives count the attention that keys receive;
            0 if they do not.
        bus_share: of missing blocks, the share that the GPU reads before it attends, while the CPU attends to the
            others; None where the GPU attends to all (`hetero_kv.families.retrieval.split_context`).
    """

    blocks: int
    bounds: bool
    largest: bool
    is_shared: bool
    heads: int = 0
    bus_share: float | None = None

    @property
    def needs_cpu(self) -> bool:
        """Whether the CPU attends to some of the blocks."""
        return self.bus_share is not None and self.reads_blocks

    @property
    def reads_blocks(self) -> bool:
        """Whether a GPU reads blocks of the Context."""
        return self.blocks > 0

    def context(
        self, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> ResidentContext:
        """An empty Context; the arguments as for it."""
        return ResidentContext(self, pool, capacity, like_keys, like_values)


class ResidentContext(DeviceContext):
    """Representatives of all blocks, and slots for the chosen ones.

    Args:
        choice: how blocks are chosen.
        pool: the layer's blocks in DRAM.
        capacity: the most blocks of a sequence.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    indexed = ("representatives",)

    def __init__(
        self, choice: ResidentChoice, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        self.choice = choice
        (batch, kv_heads), count = like_keys.shape[:2], min(choice.blocks, capacity)
        super().__init__(BlockIndex(pool, self.indexed, capacity if count else 0, batch, like_keys.device))
        self._ids = torch.full((batch, kv_heads, count), NONE, device=like_keys.device)
        self._slots = _slots(pool, (batch, kv_heads, count), like_keys, like_values)
        self._k_dim = like_keys.shape[3]

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

    def _forget_from(self, context: int) -> None:
        self._ids.masked_fill_(self._ids >= context, NONE)

    def empty_slots(self) -> None:
        """See DeviceContext."""
        self._ids.fill_(NONE)

    def attended(
        self, call: AttentionCall, memory: LayerMemory[Any], pool: BlockPool, numbers: torch.Tensor,
        table: torch.Tensor, sent: SentToken, cpu: CpuTurn | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See DeviceContext."""
        vectors, ids, *parts = memory.context
        if ids.shape[2]:
            _, misses, into = self._placed(call, vectors, ids, numbers[:, CONTEXT], sent.missed)
            self._fetch(pool, table, misses, into, parts)
        places = memory.window, memory.initial, ids, Slots(*parts), numbers
        shares, logarithms = attend(call.q, call.k, call.v, *places, call.scale, call.softcap, (sent.key, sent.value))
        out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        join_parts(shares, logarithms, None, None, out, lse)
        return out, lse

    def _placed(
        self, call: AttentionCall, vectors: AnyMemory, ids: AnyMemory, count: torch.Tensor, missed: torch.Tensor
    ) -> tuple[AnyMemory, torch.Tensor, torch.Tensor]:
        """Choose blocks, and slots for them; as `gpu_ops.resident_slots.placed`."""
        choice = self.choice
        # As on the CPU the representatives' products count as they are.
        scores = block_scores(call.q, vectors, count, choice.bounds, 1.0)
        chosen = best_blocks(scores, count, ids.shape[2], choice.largest, is_shared=choice.is_shared)
        return placed(ids, chosen, missed)

    def _fetch(
        self, pool: BlockPool, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, parts: Sequence[AnyMemory]
    ) -> None:
        """Read missing blocks into their slots."""
        for stored, slots in zip(fetched_arrays(pool), parts, strict=True):
            fetch(as_words(stored), table, misses, into, as_words(slots))

    @property
    def _parts(self) -> list[torch.Tensor]:
        """The slots of each of `fetched_arrays`."""
        return [part for part in self._slots if part is not None]

    def sent_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """See DeviceContext."""
        heads = self.choice.heads
        return {"query": (rows, heads, self._k_dim), "lse": (rows, heads)} if heads else {}

    @property
    def _slot_arrays(self) -> list[torch.Tensor]:
        return [self._ids, *self._parts]

    def _set_slot_arrays(self, arrays: list[torch.Tensor]) -> None:
        self._ids, *slots = arrays
        self._slots = Slots(*slots)

    def missed_bytes(self, pool: BlockPool) -> int:
        """See DeviceContext."""
        return sum(array[0].nbytes for array in fetched_arrays(pool)) // pool.keys.shape[1]

    def counts(self, length: int, context: int, rows: int, sent: SentToken) -> StepCounts:
        """See DeviceContext."""
        groups = DecodedGroups([length], [context], [True], [slice(rows)])
        blocks = self.choice.blocks
        return StepCounts(groups, CHOSEN if blocks else AS_GIVEN, blocks, 1, 0, 1, None, None, False)


def _slots(
    pool: BlockPool, shape: tuple[int, int, int], like_keys: torch.Tensor, like_values: torch.Tensor
) -> Slots[torch.Tensor]:
    """Empty slots: plain numbers in the model's dtype, packed ones and key offsets as they are stored."""

    def memory(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return like_keys.new_zeros(*shape, *stored.shape[2:], dtype=dtype)

    offsets = pool.key_offsets
    return Slots(
        memory(pool.keys, like_keys.dtype if pool.key_storage.is_plain else pool.keys.dtype),
        memory(pool.values, like_values.dtype if pool.value_storage.is_plain else pool.values.dtype),
        None if offsets is None else memory(offsets, offsets.dtype),
    )
