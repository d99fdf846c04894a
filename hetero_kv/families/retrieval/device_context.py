"""A layer's Context on a GPU that chooses what a decoded token attends to, and attends to it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.block_index import BlockIndex
from hetero_kv.gpu_ops.row_memory import AnyMemory
from hetero_kv.store.pool import BlockPool


class SentToken(NamedTuple):
    """What a layer sends to the CPU of a decoded token; contiguous.

    Attributes:
        key, value: [batch, kv_heads, 1, dim] float32.
        missed: [batch * kv_heads] int32, blocks or tokens of each kv head that were read from DRAM into slots.
        taken: [batch * kv_heads, 4] int32, as of `gpu_ops.token_choice`, or [batch * kv_heads, 1], tokens in slots
            alone; None if their number never varies.
        shares: [batch * kv_heads] float32, the share of the attention that is attended to by estimate, a mean over
            query heads; None if nothing is estimated.
        query: [batch, heads, k_dim] float32, and lse: [batch, heads] float32, the log-sum-exp of its attention; None if
            representatives do not count what keys receive.
        beyond: [batch * kv_heads] int32, tokens for which there were no slots, so that they were attended to where they
            lie in DRAM; None if there are always enough.
    """

    key: torch.Tensor
    value: torch.Tensor
    missed: torch.Tensor
    taken: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    query: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    beyond: torch.Tensor | None = None

    def of_rows(self, rows: slice, batch: int) -> SentToken:
        """The part of some of `batch` rows."""
        found = {}
        for name, part in self._asdict().items():
            if part is not None:
                each = len(part) // batch
                part = part[rows.start * each : rows.stop * each]
            found[name] = part
        return SentToken(**found)


class LayerMemory(NamedTuple, Generic[AnyMemory]):
    """What the kernels of a layer read and write of each row.

    Attributes:
        window: keys and values, as in `gpu_ops.resident_attention`.
        initial: places in the window for the first tokens.
        context: as `DeviceContext.arrays`.
    """

    window: tuple[AnyMemory, AnyMemory]
    initial: int
    context: Sequence[AnyMemory]


class CpuTurn(Protocol):
    """What the CPU attends to of a decoded token in a layer, while the GPU attends to the rest.

    Attributes:
        listed: [rows, kv_heads, n] int32 on the device; receives the blocks that the CPU attends to, padded with -1.
    """

    listed: torch.Tensor

    def send(self, q: torch.Tensor) -> None:
        """Start to copy `listed` and the queries to the CPU."""

    def attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for them, and have the CPU attend.

        Returns out [rows, heads, 1, v_dim] and its log-sum-exp, float32 on the device.
        """


class DeviceChoice(Protocol):
    """How a layer chooses on a GPU."""

    @property
    def reads_blocks(self) -> bool:
        """Whether a GPU reads blocks of the Context."""

    @property
    def needs_cpu(self) -> bool:
        """Whether the CPU attends to some of what is chosen."""

    def context(
        self, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> DeviceContext:
        """An empty Context of a layer.

        Args:
            pool: the layer's blocks in DRAM.
            capacity: the most blocks of a sequence.
            like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
        """


class DeviceContext(ABC):
    """Memory of one layer, of a fixed size, so that a captured token finds it where it was.

    Args:
        index: the arrays by which blocks are scored.
    """

    #: The arrays of a pool by which blocks are scored.
    indexed: tuple[str, ...]

    def __init__(self, index: BlockIndex) -> None:
        self._index = index

    def take_in(self, pool: BlockPool, context: Sequence[np.ndarray] | np.ndarray) -> None:
        """See BlockIndex."""
        self._index.take_in(pool, context)

    def take_computed(self, first: int, derived: Mapping[str, torch.Tensor]) -> None:
        """See BlockIndex."""
        self._index.take_computed(first, derived)

    def shorten(self, context: int) -> None:
        """Forget all but the first `context` blocks of the Context."""
        if context < self._index.count:
            self._index.shorten(context)
            self._forget_from(context)

    @property
    def arrays(self) -> list[torch.Tensor]:
        """What `attended` reads and writes, [batch, ...] each."""
        return [*self._index.arrays(self.indexed), *self._slot_arrays]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._index.nbytes + sum(part.nbytes for part in self._slot_arrays)

    def selected(self, rows: list[int]) -> Self:
        """New memory, whose row i is a copy of row `rows[i]`."""
        new = copy.copy(self)
        new._index = self._index.selected(rows)
        new._set_slot_arrays([torch.cat([part[row : row + 1] for row in rows]) for part in self._slot_arrays])
        return new

    @abstractmethod
    def sent_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what is sent to the CPU besides key, value and `missed`, by the names of `SentToken`."""

    @property
    @abstractmethod
    def _slot_arrays(self) -> list[torch.Tensor]:
        """All arrays of the slots, [batch, ...] each."""

    @abstractmethod
    def _set_slot_arrays(self, arrays: list[torch.Tensor]) -> None:
        """Replace `_slot_arrays`."""

    @abstractmethod
    def _forget_from(self, context: int) -> None:
        """Forget what slots have of the Context's blocks from `context` on."""

    @abstractmethod
    def empty_slots(self) -> None:
        """Forget what slots have: a token that failed may have named what did not arrive."""

    @abstractmethod
    def attended(
        self, call: AttentionCall, memory: LayerMemory[Any], pool: BlockPool, numbers: torch.Tensor,
        table: torch.Tensor, sent: SentToken, cpu: CpuTurn | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """A decoded token's attention to its window and its Context, after `take_in`; kernels alone but for `cpu`.

        Args:
            memory: of rows like this Context's, found by addresses; `EstimatedContext` takes tensors, too.
            numbers: see `gpu_ops.resident_attention`.
            table: [batch, capacity] int32, the Context's blocks in the pool, on the device.
            sent: is written.
            cpu: attends to a part; None where the GPU attends to all.

        Returns out [batch, heads, 1, v_dim] in the model's dtype, and its log-sum-exp [batch, heads, 1].
        """

    @abstractmethod
    def missed_bytes(self, pool: BlockPool) -> int:
        """Bytes that cross the bus for each of `SentToken.missed`."""

    @abstractmethod
    def counts(self, length: int, context: int, rows: int, sent: SentToken) -> Any:
        """The counts of a decoded token of sequences of `length` tokens with `context` blocks in their Context.

        sent: on the CPU.

        Returns them as the layer takes them (`ResidentLayer.count`): StepCounts, unless its family has others.
        """


def fetched_arrays(pool: BlockPool) -> list[torch.Tensor]:
    """What a GPU reads of a block: keys, values, and the offset of keys that have one."""
    return [array for array in (pool.keys, pool.values, pool.key_offsets) if array is not None]
