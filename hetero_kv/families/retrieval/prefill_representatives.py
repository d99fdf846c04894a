"""A cache layer that computes its blocks' representatives while a prompt is written, also from a GPU."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.step import Step
from hetero_kv.families.gpu_prefill.layer import GpuPrefillCache
from hetero_kv.families.gpu_prefill.writing import PromptWriting, VectorsOf
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.storage import StorageType

if TYPE_CHECKING:
    from hetero_kv.families.retrieval.layout import RetrievalLayout


class PrefillRepresentativesLayer(GpuPrefillCache):
    """A cache layer that computes its blocks' representatives while a prompt is written.

    Args:
        vectors_of: computes the representatives of blocks on a GPU while a prompt is written; None if they need the
            whole prompt.
    """

    layout: RetrievalLayout

    def __init__(
        self, storage: StorageType, value_storage: StorageType | None, vectors_of: VectorsOf | None = None
    ) -> None:
        super().__init__(storage, value_storage)
        self.vectors_of = vectors_of

    @abstractmethod
    def _prepare(self, keys: torch.Tensor, values: torch.Tensor) -> BlockPool:
        """Create the pool for keys [batch, kv_heads, tokens, k_dim] and values, if necessary, and return it."""

    def _begun_writing(self, step: Step, buffer: PrefillBuffer) -> PromptWriting:
        pool, blocks = self._prepare(buffer.keys, buffer.values), step.blocks(self.layout)
        first, end = blocks.newly_finalized
        represented = max(first, self.layout.sink_blocks), end
        write_out = self.group.store.write_out(buffer.keys.device)
        return PromptWriting(pool, buffer, blocks.table, write_out, represented, self.vectors_of)

    def _store_from_gpu(
        self, step: Step, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None
    ) -> None:
        """Write all new tokens to the pool. Raises HeteroKVError for a number too large for its storage type."""
        here = PrefillBuffer(keys, values, step.past, step.length, first=step.past)
        self._write_from_gpu(step, here if buffer is None else buffer)
        assert self.writing is not None
        self._require_within(self.writing.largest)
