"""The cache layer of retrieval attention on a GPU that chooses blocks and attends to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch

from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.engine.statistics import NO_NUMBERS
from hetero_kv.engine.step import Step
from hetero_kv.engine.store import Store
from hetero_kv.families.gpu_prefill.writing import VectorsOf
from hetero_kv.families.retrieval import saving
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.device_context import DeviceChoice, DeviceContext, SentToken, fetched_arrays
from hetero_kv.families.retrieval.indexed_layer import IndexedLayer
from hetero_kv.families.retrieval.layer import RetrievalLayer, count_step
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.retrieval.read_bytes import ReadSizes
from hetero_kv.families.retrieval.resident_context import ResidentContext
from hetero_kv.families.retrieval.statistics import CPU_BYTES, DRAM_BYTES
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.store.pool import BlockPool

_memory_numbers = itertools.count()


class ResidentLayer(IndexedLayer[DeviceContext]):
    """A retrieval layer whose representatives and chosen blocks are on the GPU, too.

    Args:
        choice: how blocks are chosen.

    Attributes:
        from_dram: bytes that the GPU read from DRAM for a token, per row.
        by_cpu: bytes of keys and values that the CPU attended to for a token, per row.
        memory_number: of its memory on the GPU; another one where the memory is another.
    """

    def __init__(
        self, layout: RetrievalLayout, settings: PagedSettings, derived: Derived, vectors_of: VectorsOf | None,
        choice: DeviceChoice,
    ) -> None:  # fmt: skip
        super().__init__(layout, settings, derived, vectors_of, choice.context)
        self._choice = choice
        self.from_dram = self.by_cpu = NO_NUMBERS
        self.memory_number = next(_memory_numbers)

    def reset(self) -> None:
        super().reset()
        self.from_dram = self.by_cpu = NO_NUMBERS

    def _prepare(self, keys: torch.Tensor, values: torch.Tensor) -> BlockPool:
        before, pool = self.resident, super()._prepare(keys, values)
        if self.resident is not before:
            self.memory_number = next(_memory_numbers)
        return pool

    @property
    def _window_len(self) -> int:
        return self.group.store.capacity if self.layout.has_whole_window else super()._window_len

    @property
    def window_in_use(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See RetrievalLayer. In the window of a whole sequence a token's place is its position."""
        keys, values = super().window_in_use
        if self.layout.has_whole_window:
            return keys[:, :, : self.group.length], values[:, :, : self.group.length]
        return keys, values

    def blocks_are_mapped(self, device: torch.device) -> bool:
        """Whether a GPU's kernels can read the blocks in DRAM, if they read any; maps new ones if possible."""
        if not self._choice.reads_blocks:
            return True
        assert self.pool is not None
        store, arrays = self.group.store, fetched_arrays(self.pool)
        # In the store, which forks share, because memory can be page-locked only once.
        if self.layer_idx not in store.mapped:
            store.mapped[self.layer_idx] = tuple(MappedMemory(array, device) for array in arrays)
        touched = store.allocators[self.layout].touched_blocks
        return all(each.reach(touched * each.tensor[0].nbytes) for each in store.mapped[self.layer_idx])

    # -- rollback and fork

    def snapshot(self) -> Any:
        return super().snapshot(), self.from_dram, self.by_cpu

    def rollback(self, snapshot: Any) -> None:
        before, self.from_dram, self.by_cpu = snapshot
        super().rollback(before)
        if self.resident is not None:
            self.resident.empty_slots()

    def fork(self, memo: dict[int, Any]) -> RetrievalLayer:
        forked = super().fork(memo)
        assert isinstance(forked, ResidentLayer)
        forked.memory_number = next(_memory_numbers)
        return forked

    def select(self, rows: Rows[int]) -> None:
        super().select(rows)
        self.memory_number = next(_memory_numbers)

    @property
    def needs_cpu(self) -> bool:
        """Whether the CPU attends to some of the blocks."""
        return self._choice.needs_cpu

    @property
    def captured_memory(self) -> Store | None:
        has_memory = self.resident is not None and self.record is None
        return self.group.store if has_memory and not self.needs_cpu else None

    # -- in a file

    def saved(self) -> SavedPart:
        part = super().saved()
        if isinstance(self.resident, ResidentContext):
            # The order of blocks in slots decides how sums are rounded.
            part.put(resident_blocks=self.resident.ids)
        return part

    def after_restore(self, part: SavedPart) -> None:
        super().after_restore(part)
        if not isinstance(self.resident, ResidentContext) or not part.has("resident_blocks"):
            return
        assert self.pool is not None
        ids = saving.restored_resident_blocks(self, part, *self.resident.ids.shape[:2])
        # Another budget has another number of slots.
        if ids.shape == self.resident.ids.shape:
            context = [self.context_of(self.block_ids(row), self.group.length) for row in range(len(ids))]
            self.resident.fill(self.pool, context, ids)

    # -- statistics

    @property
    def statistics(self) -> dict[str, float | int | None]:
        own = {DRAM_BYTES.name: self.from_dram.mean, CPU_BYTES.name: self.by_cpu.mean}
        return {**super().statistics, **own}

    def count_token(self, step: Step, sent: SentToken) -> None:
        """Count a token that the GPU attended to; `sent` is on the CPU."""
        pool, resident, rows = self.pool, self.resident, len(step.group.sequences)
        assert pool is not None
        assert resident is not None
        self.count_taken(step, resident.counts(step.length, self.layout.context_blocks(step.length), rows, sent))
        tokens = int(sent.missed.sum()) + (0 if sent.beyond is None else int(sent.beyond.sum()))
        self.from_dram = self.from_dram.plus(tokens * resident.missed_bytes(pool) / rows)

    def count_taken(self, step: Step, counts: Any) -> None:
        """Count what a token attended to, by `DeviceContext.counts`."""
        if self.reading is None:
            assert self.pool is not None
            self.reading = ReadSizes.of(self.pool, self.window)
        count_step([self], counts)

    def count_listed(self, listed: np.ndarray) -> None:
        """Count blocks that the CPU attended to for a token, [rows, kv_heads, n] padded with -1."""
        assert self.pool is not None
        assert self.resident is not None
        blocks = int(np.count_nonzero(listed >= 0))
        self.by_cpu = self.by_cpu.plus(blocks * self.resident.missed_bytes(self.pool) / len(listed))
