"""The cache of one layer whose tokens all stay in DRAM, in blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.errors import HeteroKVError
from hetero_kv.kv.block_table import BlockTable
from hetero_kv.kv.device_window import DeviceWindow
from hetero_kv.kv.pool import BlockPool
from hetero_kv.kv.storage import StorageType


class CacheFullError(HeteroKVError):
    """More tokens than `max_seq_len` were to be stored. Nothing was stored."""


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


class PagedLayer(CacheLayerMixin):
    """Block tables over one pool, a table per row of the batch; all rows have the same length.

    A sequence is Initial | Context | Local in whole blocks from position 0 on: the first `initial_blocks`, then the
    Context, then at least the last `local_len` tokens. A block enters the Context when `local_len` tokens follow it.

    Args:
        capacity: tokens that a row can hold (`max_seq_len`).
        block_size: tokens per block.
        initial_len: tokens of the attention sink, rounded up to whole blocks.
        local_len: tokens of the end window.
        storage: number format of the pool.
        representative_num: representatives per block and kv head.
        on_stored: called with this layer when tokens were stored, so that the operator can index new Context blocks;
            with the buffer of the whole sequence when they were a prompt.
        keep_received: whether the pool keeps the attention that each key received.
        state: what the operator remembers beside the tokens; `checkpoint` copies it.

    Attributes:
        pool: the blocks; None before the first token.
        rows: a block table per row of the batch.
        window: Initial and Local on the compute device; None where that is the CPU, which reads them from the pool.
        indexed_blocks: blocks from the start of the sequence whose representatives stand in the pool.
    """

    is_sliding = False

    def __init__(
        self,
        capacity: int,
        block_size: int,
        initial_len: int,
        local_len: int,
        storage: StorageType,
        representative_num: int,
        on_stored: Callable[[PagedLayer, PrefillBuffer | None], None],
        keep_received: bool = False,
        state: Any = None,
    ) -> None:
        super().__init__()
        self.capacity = capacity
        self.block_size = block_size
        self.initial_blocks = -(-initial_len // block_size)
        self.local_len = local_len
        self.storage = storage
        self.representative_num = representative_num
        self.on_stored = on_stored
        self.keep_received = keep_received
        self.state = state
        self._blank_state = copy.copy(state)
        self.pool: BlockPool | None = None
        self.rows: list[BlockTable] = []
        self.window: DeviceWindow | None = None
        self.indexed_blocks = 0
        self.prefill_buffer: PrefillBuffer | None = None
        self._prefill_tokens = 0

    # -- what transformers asks of a cache layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pool, once the shapes are known: keys [batch, kv_heads, tokens, k_dim], values likewise."""
        batch, kv_heads, _, k_dim = key_states.shape
        per_row = -(-self.capacity // self.block_size)
        self.pool = BlockPool(
            batch * per_row,
            kv_heads,
            self.block_size,
            k_dim,
            value_states.shape[-1],
            self.storage,
            self.representative_num,
            self.keep_received,
        )
        self.rows = [BlockTable(self.pool, self.capacity) for _ in range(batch)]
        if _needs_window(key_states.device):
            initial = self.initial_blocks * self.block_size
            self.window = DeviceWindow(initial, self.local_len, self.block_size, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys and values on to the operator, which stores what its attention receives."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens stored or being prefilled in this layer."""
        if self.prefill_buffer is not None:
            return self.prefill_buffer.length
        return self.rows[0].length if self.rows else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the mask that `query_length` new tokens would need."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """`max_seq_len`, tokens."""
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        self.restore((self.get_seq_length() - abs(tokens_to_remove), self.state))

    def reset(self) -> None:
        """Forget every token and give the memory back."""
        self.pool, self.rows, self.window, self.indexed_blocks = None, [], None, 0
        self.state, self.is_initialized = copy.copy(self._blank_state), False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i continue row `beam_idx[i]` (beam search): the blocks are shared, not copied."""
        forks = [self.rows[int(source)].fork() for source in beam_idx]
        for row in self.rows:
            row.free()
        self.rows = forks
        self.state = self.state.reordered(beam_idx) if self.state is not None else None
        self._reload_window()

    # -- the parts of the sequence

    @property
    def block_tables(self) -> np.ndarray:
        """Pool ids of the blocks of every row, [rows, blocks] int32, a copy."""
        return np.stack([row.ids for row in self.rows])

    @property
    def context_blocks(self) -> int:
        """Blocks of the Context. A function of the length alone."""
        return max(0, (self.get_seq_length() - self.local_len) // self.block_size - self.initial_blocks)

    @property
    def context_end(self) -> int:
        """Index of the block at which Local begins."""
        return min(self.initial_blocks, self.rows[0].num_blocks) + self.context_blocks

    # -- storing tokens

    def require_room(self, tokens: int) -> None:
        """Raise CacheFullError unless `tokens` more fit."""
        length = self.get_seq_length()
        room = self.capacity - length
        if tokens > room:
            remedy = f", or shorten the input to {room} tokens" if room else ""
            raise CacheFullError(
                f"the cache is full: max_seq_len is {self.capacity} tokens, {length} are stored and {tokens} more were "
                f"to be added; set max_seq_len to at least {length + tokens}{remedy}"
            )

    def append(self, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        """Store new tokens of every row: keys [batch, kv_heads, tokens, k_dim], values likewise.

        `buffer` holds the whole sequence when the tokens are a prompt.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._require_finite(keys, values)
        for row, row_keys, row_values in zip(self.rows, keys, values, strict=True):
            row.append(row_keys, row_values)
        if self.window is not None and keys.shape[2] == 1:
            self.window.append(keys, values, self.context_end * self.block_size)
        else:
            self._reload_window()
        self.on_stored(self, buffer)

    def _require_finite(self, *vectors: torch.Tensor) -> None:
        """Raise HeteroKVError for numbers that the storage type would turn into infinity."""
        if self.storage.largest is None:
            return
        # aminmax, because abs would copy a whole prompt's keys.
        found = max(abs(float(end)) for tensor in vectors for end in torch.aminmax(tensor))
        if found > self.storage.largest:
            raise HeteroKVError(
                f"a key or value of {found:.0f} is beyond kv_type {self.storage.name}, which ends at "
                f"{self.storage.largest:.0f}; set kv_type to a type with a wider range, such as FP32"
            )

    def add_received(self, received: torch.Tensor, start: int) -> None:
        """Add attention that keys received, [batch, kv_heads, tokens] float32 of the positions from `start` on.

        `start` is the first position of a block.
        """
        assert self.pool is not None
        assert self.pool.received is not None
        tokens = received.shape[2]
        padded = torch.nn.functional.pad(received, (0, -tokens % self.block_size))
        blocks = padded.unflatten(2, (-1, self.block_size)).transpose(1, 2)
        first = start // self.block_size
        for row, added in zip(self.rows, blocks, strict=True):
            ids = torch.from_numpy(row.ids[first : first + len(added)].astype(np.int64))
            self.pool.received[ids] += added

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Within this context `tokens` new tokens arrive in chunks (`extend`); they are stored when it ends well."""
        self.require_room(tokens)
        self._prefill_tokens = tokens
        try:
            yield
            if self.prefill_buffer is not None:
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
        buffer = PrefillBuffer(
            keys.new_empty(*keys.shape[:2], past + self._prefill_tokens, keys.shape[3]),
            values.new_empty(*values.shape[:2], past + self._prefill_tokens, values.shape[3]),
            past,
            past,
        )
        for index, row in enumerate(self.rows):
            row.gather(buffer.keys[index, :, :past], buffer.values[index, :, :past])
        return buffer

    # -- going back

    def checkpoint(self) -> tuple[int, Any]:
        """What `restore` needs to come back to the present state."""
        return self.rows[0].length if self.rows else 0, copy.copy(self.state)

    def restore(self, checkpoint: tuple[int, Any]) -> None:
        """Forget what was stored since `checkpoint`."""
        length, self.state = checkpoint[0], copy.copy(checkpoint[1])
        for row in self.rows:
            row.truncate(length)
        self.indexed_blocks = min(self.indexed_blocks, length // self.block_size)
        self._reload_window()

    def _reload_window(self) -> None:
        if self.window is not None:
            self.window.load(self.rows, self.context_end * self.block_size)

    @property
    def dram_bytes(self) -> int:
        """DRAM that the stored tokens have touched, in bytes."""
        return self.pool.bytes_touched if self.pool else 0


def _needs_window(device: torch.device) -> bool:
    """Whether attention over Initial and Local runs on another device than the pool's."""
    return device.type != "cpu"
