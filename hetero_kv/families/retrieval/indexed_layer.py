"""A cache layer whose blocks a GPU scores: what it scores them by lies there, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.step import Step
from hetero_kv.families.gpu_prefill.writing import PromptWriting, VectorsOf
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.block_index import BlockIndex
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.retrieval.window_step import BlockChoosing, TritonWindowStep
from hetero_kv.gpu_ops.staging import Staging
from hetero_kv.gpu_ops.window_step import SPLITS
from hetero_kv.store.pool import BlockPool


class OnDevice(Protocol):
    """What a layer has of its Context on a GPU; its memory has a fixed size."""

    def take_computed(self, first: int, derived: Mapping[str, torch.Tensor]) -> None:
        """See BlockIndex."""

    def shorten(self, context: int) -> None:
        """Forget all but the first `context` blocks of the Context."""

    def selected(self, rows: list[int]) -> Self:
        """New memory, whose row i is a copy of row `rows[i]`."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""


T = TypeVar("T", bound=OnDevice)
#: Makes it, empty, from the pool, the most blocks of a sequence, and keys and values for shapes, dtype and device.
Maker = Callable[[BlockPool, int, torch.Tensor, torch.Tensor], T]


class IndexedLayer(RetrievalLayer, Generic[T]):
    """A retrieval layer that keeps something of its Context on a GPU.

    Args:
        on_device: makes that.

    Attributes:
        resident: it; None before the first tokens, and where the model computes on the CPU.
    """

    def __init__(
        self, layout: RetrievalLayout, settings: PagedSettings, derived: Derived, vectors_of: VectorsOf | None,
        on_device: Maker[T],
    ) -> None:  # fmt: skip
        super().__init__(layout, settings, derived, vectors_of)
        self._on_device = on_device
        self.resident: T | None = None

    def reset(self) -> None:
        super().reset()
        self.resident = None

    def _prepare(self, keys: torch.Tensor, values: torch.Tensor) -> BlockPool:
        pool = super()._prepare(keys, values)
        if self.resident is None and self.window is not None:
            capacity = -(-self.group.store.capacity // self.layout.block_size)
            self.resident = self._on_device(pool, capacity, keys, values)
        return pool

    def _begun_writing(self, step: Step, buffer: PrefillBuffer) -> PromptWriting:
        writing = super()._begun_writing(step, buffer)
        writing.on_represented = self._represented
        return writing

    def _represented(self, block: int, derived: Mapping[str, torch.Tensor]) -> None:
        """Keep a prompt's representatives, of blocks from `block` on, where they were computed."""
        if self.resident is not None:
            self.resident.take_computed(block - self.layout.sink_blocks, derived)

    def context_of(self, table: np.ndarray, length: int) -> np.ndarray:
        """The Context's blocks of a sequence of `length` tokens, from its block table [..., blocks]."""
        end = self.layout.context_end(length)
        return table[..., end - self.layout.context_blocks(length) : end]

    # -- rollback and fork

    def reopen(self) -> None:
        super().reopen()
        if self.resident is not None and self.accumulates:
            # Representatives are computed again, of what a sequence of its own attends to.
            self.resident.shorten(0)

    def crop(self, length: int) -> None:
        super().crop(length)
        self._shorten(length)

    def rollback(self, snapshot: Any) -> None:
        super().rollback(snapshot)
        self._shorten(self.group.length)

    def _shorten(self, length: int) -> None:
        if self.resident is not None:
            self.resident.shorten(self.layout.context_blocks(length))

    def fork(self, memo: dict[int, Any]) -> RetrievalLayer:
        forked = super().fork(memo)
        assert isinstance(forked, IndexedLayer)
        forked.resident = copy.deepcopy(self.resident)
        return forked

    def select(self, rows: Rows[int]) -> None:
        super().select(rows)
        self.resident = None if self.resident is None else self.resident.selected(list(rows))

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + (0 if self.resident is None else self.resident.nbytes)


def representatives_on_device(
    pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
) -> BlockIndex:
    """A `Maker` of the blocks' representatives."""
    return BlockIndex(pool, ("representatives",), capacity, len(like_keys), like_keys.device)


class ScoredLayer(IndexedLayer[BlockIndex]):
    """A retrieval layer whose blocks a GPU chooses by their representatives, for the CPU to attend to.

    Args:
        blocks: the most blocks that a kv head chooses.
    """

    def __init__(
        self, layout: RetrievalLayout, settings: PagedSettings, derived: Derived, vectors_of: VectorsOf | None,
        blocks: int,
    ) -> None:  # fmt: skip
        super().__init__(layout, settings, derived, vectors_of, representatives_on_device)
        self._blocks = blocks

    def chosen_step(self, call: AttentionCall, local_start: int, choosing: BlockChoosing | None) -> TritonWindowStep:
        """As `window_step`, for a window that is attended to by Triton's kernels.

        choosing: writes the chosen blocks, [rows, kv_heads, blocks] int32, on the device; they go to the CPU with the
        token. None: everything is attended to.
        """
        assert self.window is not None
        q, k, v = call.q, call.k, call.v
        of_groups = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
        chosen = *of_groups[:2], self._blocks
        down = q.shape, k.shape, v.shape, (*of_groups[:2], SPLITS, of_groups[2]), chosen
        shapes = down, ((*q.shape[:3], v.shape[3]), of_groups), q.shape[:2]
        if self.staging is None or not self.staging.fits(q.device, *shapes):
            self._settle()
            self.staging = Staging(q.device, *shapes)
        return TritonWindowStep(self.window, self.staging, call, local_start, False, choosing)
