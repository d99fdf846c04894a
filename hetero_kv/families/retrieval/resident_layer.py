"""The cache layer of retrieval attention on a GPU that chooses blocks and attends to them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch

from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.engine.statistics import NO_NUMBERS
from hetero_kv.engine.step import Step
from hetero_kv.families.gpu_prefill.writing import PromptWriting, VectorsOf
from hetero_kv.families.retrieval import saving
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.device_context import DeviceContext, fetched_arrays
from hetero_kv.families.retrieval.estimated_context import EstimatedChoice
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.retrieval.resident_context import ResidentChoice, ResidentContext
from hetero_kv.families.retrieval.statistics import DRAM_BYTES
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.store.pool import BlockPool

_memory_numbers = itertools.count()


class ResidentLayer(RetrievalLayer):
    """A retrieval layer whose representatives and chosen blocks are on the GPU, too.

    Args:
        choice: how blocks are chosen.

    Attributes:
        resident: the Context on the GPU; None before the first tokens.
        from_dram: bytes that the GPU read from DRAM for a token, per row.
    """

    def __init__(
        self, layout: RetrievalLayout, settings: PagedSettings, derived: Derived, vectors_of: VectorsOf | None,
        choice: ResidentChoice | EstimatedChoice,
    ) -> None:  # fmt: skip
        super().__init__(layout, settings, derived, vectors_of)
        self._choice = choice
        self.resident: DeviceContext | None = None
        self.from_dram = NO_NUMBERS
        self._memory_number = next(_memory_numbers)

    def reset(self) -> None:
        super().reset()
        self.resident, self.from_dram = None, NO_NUMBERS

    def _prepare(self, keys: torch.Tensor, values: torch.Tensor) -> BlockPool:
        pool = super()._prepare(keys, values)
        if self.resident is None and self.window is not None:
            capacity = -(-self.group.store.capacity // self.layout.block_size)
            self.resident = self._choice.context(pool, capacity, keys, values)
            self._memory_number = next(_memory_numbers)
        return pool

    def _begun_writing(self, step: Step, buffer: PrefillBuffer) -> PromptWriting:
        writing = super()._begun_writing(step, buffer)
        writing.on_represented = self._represented
        return writing

    def _represented(self, block: int, derived: Mapping[str, torch.Tensor]) -> None:
        """Keep a prompt's representatives, of blocks from `block` on, where they were computed."""
        if self.resident is not None:
            self.resident.take_computed(block - self.layout.sink_blocks, derived)

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

    def snapshot(self) -> Any:
        return super().snapshot(), self.from_dram

    def rollback(self, snapshot: Any) -> None:
        before, self.from_dram = snapshot
        super().rollback(before)
        self._shorten(self.group.length)
        if self.resident is not None:
            self.resident.empty_slots()

    def _shorten(self, length: int) -> None:
        if self.resident is not None:
            self.resident.shorten(self.layout.context_blocks(length))

    def fork(self, memo: dict[int, Any]) -> RetrievalLayer:
        forked = super().fork(memo)
        assert isinstance(forked, ResidentLayer)
        forked.resident = copy.deepcopy(self.resident)
        forked._memory_number = next(_memory_numbers)
        return forked

    def select(self, rows: Rows[int]) -> None:
        super().select(rows)
        self.resident = None if self.resident is None else self.resident.selected(list(rows))
        self._memory_number = next(_memory_numbers)

    @property
    def captured_memory(self) -> int | None:
        is_ready = self.resident is not None and self.layout in self.group.device_tokens
        return self._memory_number if is_ready and self.record is None else None

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

    # -- memory and statistics

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + (0 if self.resident is None else self.resident.nbytes)

    @property
    def statistics(self) -> dict[str, float | int | None]:
        return {**super().statistics, DRAM_BYTES.name: self.from_dram.mean}
