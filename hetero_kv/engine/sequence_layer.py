"""A cache layer that keeps every token of its sequences, up to a capacity, and takes prompts in chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from hetero_kv.engine.operator_layer import OperatorLayer
from hetero_kv.errors import HeteroKVError
from hetero_kv.store.block_table import BlockTable
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.storage import StorageType


class CacheFullError(HeteroKVError):
    """More tokens were to be stored than `max_seq_len`, or the blocks shared with forks, allow. Nothing was stored."""


@dataclass
class PrefillBuffer:
    """One layer's keys and values on the compute device, while the layer prefills.

    Attributes:
        keys: [batch, kv_heads, capacity, k_dim] in the model's dtype.
        values: [batch, kv_heads, capacity, v_dim] in the model's dtype.
        past: tokens that were stored before this prefill.
        length: tokens in the buffer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    past: int
    length: int


@dataclass(frozen=True)
class PromptPart:
    """Which part of a prompt a prefill is, where another layer's policy has prompts pass in strides."""

    is_first: bool = True
    is_last: bool = True


class SequenceLayer(OperatorLayer):
    """Block tables over one pool, a table per row of the batch, and a buffer while a prompt prefills.

    All rows have the same length. What lies in the blocks, and what elsewhere, is the subclass's.

    Args:
        capacity: tokens that a row can hold (`max_seq_len`).
        storage: number format of the pool.

    Attributes:
        forks: forks that the pool has blocks for, to grow to `capacity` beside this layer; set before the first token.
        pool: the blocks; None before the first token.
        rows: a block table per row of the batch.
        part: of the prompt, what the present prefill brings.
        keeps: whether tokens are stored when their prefill ends; else they attend and are gone, and need no room.
    """

    #: The setting that `storage` comes from.
    storage_setting = "kv_type"

    def __init__(self, capacity: int, storage: StorageType) -> None:
        super().__init__()
        self.capacity = capacity
        self.storage = storage
        self.forks = 0
        self.pool: BlockPool | None = None
        self.rows: list[BlockTable] = []
        self.prefill_buffer: PrefillBuffer | None = None
        self._prefill_tokens = 0
        self.part = PromptPart()
        self.keeps = True

    # -- what transformers asks of a cache layer

    @property
    @abstractmethod
    def stored_length(self) -> int:
        """Tokens stored, without those that are being prefilled."""

    def get_seq_length(self) -> int:
        """Tokens stored or being prefilled in this layer."""
        return self.stored_length if self.prefill_buffer is None else self.prefill_buffer.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the mask that `query_length` new tokens would need."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """`max_seq_len`, tokens."""
        return self.capacity

    # -- room

    @property
    def block_tables(self) -> np.ndarray:
        """Pool ids of the blocks of every row, [rows, blocks] int32, a copy."""
        return np.stack([row.ids for row in self.rows])

    @property
    def room(self) -> int:
        """Tokens that can still be added to every row."""
        return self.capacity - self.get_seq_length()

    def require_room(self, tokens: int) -> None:
        """Raise CacheFullError unless `tokens` more fit into every row."""
        room, length = self.room, self.get_seq_length()
        if tokens <= room or not self.keeps:
            return
        shorter = f", or shorten the input to {room} tokens" if room else ""
        if length + tokens > self.capacity:
            raise CacheFullError(
                f"the cache is full: max_seq_len is {self.capacity} tokens, {length} are stored and {tokens} more were "
                f"to be added; set max_seq_len to at least {length + tokens}{shorter}"
            )
        assert self.pool is not None
        raise CacheFullError(
            f"the blocks that this cache shares with its forks are used up: {tokens} tokens were to be added and the "
            f"{self.pool.free_blocks} blocks that are free of {self.pool.num_blocks} have room for {room}; reset or "
            f"drop a fork, give the first cache more forks (HeteroCache(model, forks={self.forks + 1})){shorter}"
        )

    def _require_finite(self, *vectors: torch.Tensor) -> None:
        """Raise HeteroKVError for numbers that the storage type would turn into infinity."""
        if self.storage.largest is None:
            return
        # aminmax, because abs would copy a whole prompt's keys.
        found = max(abs(float(end)) for tensor in vectors for end in torch.aminmax(tensor))
        if found > self.storage.largest:
            raise HeteroKVError(
                f"a key or value of {found:.0f} is beyond {self.storage_setting} {self.storage.name}, which ends at "
                f"{self.storage.largest:.0f}; set {self.storage_setting} to a type with a wider range, such as FP32"
            )

    # -- prefill

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        """Store new tokens of every row: keys [batch, kv_heads, tokens, k_dim], values likewise.

        `buffer` holds the whole sequence when the tokens are a prompt.
        """

    @abstractmethod
    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all stored tokens into [batch, kv_heads, stored_length, dim] tensors, on any device."""

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Within this context `tokens` new tokens arrive in chunks (`extend`); they are stored when it ends well."""
        self.require_room(tokens)
        self._prefill_tokens = tokens
        try:
            yield
            if self.prefill_buffer is not None and self.keeps:
                buffer, self.prefill_buffer = self.prefill_buffer, None
                new = slice(buffer.past, buffer.length)
                self.append(buffer.keys[:, :, new], buffer.values[:, :, new], buffer)
        finally:
            self.prefill_buffer = None
            self._prefill_tokens = 0

    @property
    def is_prefilling(self) -> bool:
        """Whether a `prefill` context is open."""
        return self._prefill_tokens > 0

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one chunk to the prefill buffer, which is first filled with what was stored before.

        Args:
            keys: [batch, kv_heads, tokens, k_dim] of the chunk.
            values: [batch, kv_heads, tokens, v_dim].

        Returns the keys and values before this chunk, as views: [batch, kv_heads, past, dim].
        """
        if self.prefill_buffer is None:
            self.prefill_buffer = self._loaded_buffer(keys, values)
        buffer = self.prefill_buffer
        start, end = buffer.length, buffer.length + keys.shape[2]
        buffer.keys[:, :, start:end] = keys
        buffer.values[:, :, start:end] = values
        buffer.length = end
        return buffer.keys[:, :, :start], buffer.values[:, :, :start]

    def _loaded_buffer(self, keys: torch.Tensor, values: torch.Tensor) -> PrefillBuffer:
        past = self.get_seq_length()
        new_keys, new_values = (
            like.new_empty(*like.shape[:2], past + self._prefill_tokens, like.shape[3]) for like in (keys, values)
        )
        if past:
            self.load(new_keys[:, :, :past], new_values[:, :, :past])
        return PrefillBuffer(new_keys, new_values, past, past)

    # -- memory

    @property
    def dram_bytes(self) -> int:
        """DRAM that the stored tokens have touched, those of forks included, in bytes."""
        return self.pool.bytes_touched if self.pool else 0

    @property
    def shared_bytes(self) -> int:
        """DRAM of the blocks that forks hold too, in bytes."""
        if self.pool is None or not self.pool.is_shared:
            return 0
        blocks, held = np.unique(self.block_tables, return_counts=True)
        shared = sum(self.pool.references(block) > mine for block, mine in zip(blocks, held, strict=True))
        return int(shared) * self.pool.bytes_per_block
