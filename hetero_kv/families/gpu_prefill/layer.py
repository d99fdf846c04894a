"""Prefill on a GPU for a cache layer: new tokens are written to DRAM in blocks, stored ones are loaded in pieces."""

from __future__ import annotations

from abc import abstractmethod

import torch

from hetero_kv.engine.buffered_layer import BufferedLayer, PrefillBuffer
from hetero_kv.engine.step import Step
from hetero_kv.families.gpu_prefill.pieces import Pieces, stored_pieces
from hetero_kv.families.gpu_prefill.writing import PromptWriting
from hetero_kv.store.storage import StorageType


class GpuPrefillCache(BufferedLayer):
    """A cache layer that writes a prompt from the GPU block by block, and loads earlier tokens in pieces.

    Attributes:
        writing: writes the present prompt from the GPU's buffer to the pool; None outside a prompt.
        loads_past: whether a prompt on a GPU loads the tokens before it into its buffer, because its queries choose
            among them; the operator sets it.
    """

    loads_past = False

    def __init__(self, storage: StorageType, value_storage: StorageType | None = None) -> None:
        super().__init__(storage, value_storage)
        self.writing: PromptWriting | None = None

    @abstractmethod
    def _begun_writing(self, step: Step, buffer: PrefillBuffer) -> PromptWriting:
        """A new writer for a prompt; the buffer has the prompt's first tokens, or all of them."""

    @property
    def tokens_in_pieces(self) -> int:
        """The number of tokens before a prompt that are loaded in pieces, by default all; blocks are not split.

        Only the last block may be incomplete.
        """
        return self.group.length

    def _write_from_gpu(self, step: Step, buffer: PrefillBuffer) -> None:
        """Write the rest of the prompt to the pool."""
        if self.writing is None:
            self.writing = self._begun_writing(step, buffer)
        self.writing.finish()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See BufferedLayer. On a GPU it also writes the full blocks, while the chunk's attention runs."""
        before, step = super().extend(keys, values), self._prefilling
        assert step is not None
        assert self.prefill_buffer is not None
        if keys.is_cuda and step.stores:
            if self.writing is None:
                self.writing = self._begun_writing(step, self.prefill_buffer)
            self.writing.advance()
        return before

    def _loaded_buffer(self, keys: torch.Tensor, values: torch.Tensor) -> PrefillBuffer:
        """See BufferedLayer. On a GPU the buffer excludes the tokens that are loaded in pieces, unless `loads_past`."""
        if not keys.is_cuda:
            return super()._loaded_buffer(keys, values)
        assert self._prefilling is not None
        past, first = self._prefilling.past, 0 if self.loads_past else self.tokens_in_pieces
        tokens = self._prefilling.length - first
        new_keys, new_values = (like.new_empty(*like.shape[:2], tokens, like.shape[3]) for like in (keys, values))
        if self.loads_past and past:
            for start, stored_keys, stored_values in self.pieces(0, keys):
                part = slice(start, start + stored_keys.shape[2])
                new_keys[:, :, part], new_values[:, :, part] = stored_keys, stored_values
        return PrefillBuffer(new_keys, new_values, past, past, first)

    def pieces(self, start: int, like: torch.Tensor) -> Pieces:
        """The first `tokens_in_pieces` tokens, from position `start` on, where a block begins.

        In the form of `stored_pieces`, on the GPU of `like` and in its dtype.
        """
        return self._pieces_between(start, self.tokens_in_pieces, like)

    def _pieces_between(self, start: int, stop: int, like: torch.Tensor) -> Pieces:
        """The stored positions [start, stop), in the form of `pieces`."""
        assert self.pool is not None
        tables = [self.block_ids(row) for row in range(len(self.group.sequences))]
        prefetch = self.group.store.prefetch(like.device)
        return stored_pieces(self.pool, tables, start, stop, like.dtype, prefetch)

    def leave_prefill(self) -> None:
        super().leave_prefill()
        if self.writing is not None:
            self.writing.leave()
            self.writing = None
