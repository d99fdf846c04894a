"""A cache layer with chunked prefill: the prompt's KV stays on the compute device until the whole prompt is done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.storage import StorageType


@dataclass
class PrefillBuffer:
    """Keys and values of one layer on the compute device during prefill.

    Attributes:
        keys: [batch, kv_heads, capacity, k_dim] in the model's dtype.
        values: [batch, kv_heads, capacity, v_dim] in the model's dtype.
        past: tokens that were stored before this prefill.
        length: tokens of the sequence so far; the buffer ends with the last of them.
        first: position of the buffer's first token; earlier tokens, up to `past`, are only in the pool.
    """

    keys: torch.Tensor
    values: torch.Tensor
    past: int
    length: int
    first: int = 0


class BufferedLayer(FamilyLayer):
    """Keeps every token of its sequences, in blocks or elsewhere, and buffers all of them during prefill.

    Args:
        storage: storage type of the pool.
        value_storage: storage type of the values, if it differs from that of the keys.

    Attributes:
        pool: the layer's blocks; None before the first tokens.
        prefill_buffer: None outside of a prefill.
    """

    #: The settings that choose the storage types of keys and values.
    storage_settings = ("kv_type", "kv_type")

    def __init__(self, storage: StorageType, value_storage: StorageType | None = None) -> None:
        super().__init__()
        self.key_storage, self.value_storage = storage, value_storage or storage
        self.pool: BlockPool | None = None
        self.prefill_buffer: PrefillBuffer | None = None
        self._prefilling: Step | None = None

    def get_seq_length(self) -> int:
        """Tokens of each sequence, including those in prefill."""
        return self.group.length if self.prefill_buffer is None else self.prefill_buffer.length

    def get_max_length(self) -> int:
        """`max_seq_len`, tokens."""
        return self.group.store.capacity

    def _require_finite(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        """Raise HeteroKVError for a number that overflows its storage type. `keys` is None for a layer without keys."""
        for vectors, storage, setting in zip(
            (keys, values), (self.key_storage, self.value_storage), self.storage_settings, strict=True
        ):
            if vectors is not None and storage.largest is not None:
                # aminmax, because abs would copy a whole prompt's keys.
                found = max(abs(float(end)) for end in torch.aminmax(vectors))
                if found > storage.largest:
                    raise _too_large(found, storage, setting)

    def _require_within(self, largest: Sequence[float]) -> None:
        """Raise HeteroKVError when the largest magnitude of the keys or of the values overflows its storage type."""
        for found, storage, setting in zip(
            largest, (self.key_storage, self.value_storage), self.storage_settings, strict=True
        ):
            if storage.largest is not None and found > storage.largest:
                raise _too_large(found, storage, setting)

    def require_storable(self, largest: float) -> None:
        """Raise HeteroKVError when the largest stored magnitude overflows a storage type.

        With two storage types, `largest` is that of the narrower one (`cpu_ops.token_store`).
        """
        for storage, setting in zip((self.key_storage, self.value_storage), self.storage_settings, strict=True):
            if storage.largest is not None and largest > storage.largest:
                raise _too_large(largest, storage, setting)

    # -- prefill

    @abstractmethod
    def store(self, step: Step, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        """Store the new tokens of a step: keys [batch, kv_heads, tokens, k_dim], values likewise.

        For a prompt, `buffer` has the whole sequence.
        """

    @abstractmethod
    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all stored tokens into [batch, kv_heads, length, dim] tensors, on any device."""

    def begin_prefill(self, step: Step) -> None:
        """Begin a prefill: the tokens of `step` follow in chunks (`extend`)."""
        self._prefilling = step

    def end_prefill(self, step: Step) -> PrefillBuffer | None:
        """Store the prefilled tokens. Returns the buffer of the whole sequence; None when nothing is stored."""
        buffer, self.prefill_buffer = self.prefill_buffer, None
        if buffer is None or not step.stores:
            return None
        new = slice(buffer.past - buffer.first, buffer.length - buffer.first)
        self.store(step, buffer.keys[:, :, new], buffer.values[:, :, new], buffer)
        return buffer

    def leave_prefill(self) -> None:
        self.prefill_buffer = self._prefilling = None

    @property
    def is_prefilling(self) -> bool:
        """Whether this layer is in a prefill."""
        return self._prefilling is not None

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one chunk to the prefill buffer. The first chunk loads the stored tokens into the buffer.

        Args:
            keys: [batch, kv_heads, tokens, k_dim] of the chunk.
            values: [batch, kv_heads, tokens, v_dim].

        Returns the buffered keys and values before this chunk, as views: [batch, kv_heads, past, dim].
        """
        if self.prefill_buffer is None:
            self.prefill_buffer = self._loaded_buffer(keys, values)
        buffer = self.prefill_buffer
        start = buffer.length - buffer.first
        end = start + keys.shape[2]
        buffer.keys[:, :, start:end] = keys
        buffer.values[:, :, start:end] = values
        buffer.length = buffer.first + end
        return buffer.keys[:, :, :start], buffer.values[:, :, :start]

    def _loaded_buffer(self, keys: torch.Tensor, values: torch.Tensor) -> PrefillBuffer:
        assert self._prefilling is not None
        past, total = self._prefilling.past, self._prefilling.length
        if past and self.pool is not None and self.pool.read_ahead is not None:
            self.pool.read_ahead.request_all()
        new_keys, new_values = (like.new_empty(*like.shape[:2], total, like.shape[3]) for like in (keys, values))
        if past:
            self.load(new_keys[:, :, :past], new_values[:, :, :past])
        return PrefillBuffer(new_keys, new_values, past, past)

    # -- memory

    def block_ids(self, row: int) -> np.ndarray:
        """Block ids of a row, [blocks] int32, a view."""
        assert self.layout is not None
        return self.group.sequences[row].tables[self.layout].ids

    @property
    def bytes_touched(self) -> int:
        """DRAM of all blocks of this layer that any cache has ever allocated, bytes."""
        if self.pool is None or self.layout is None:
            return 0
        return self.group.store.allocators[self.layout].touched_blocks * self.pool.bytes_per_block


def _too_large(found: float, storage: StorageType, setting: str) -> HeteroKVError:
    return HeteroKVError(
        f"a key or value of {found:.0f} exceeds the range of {setting} {storage.name}, whose largest value is "
        f"{storage.largest:.0f}; set {setting} to a type with a wider range, such as FP32"
    )
