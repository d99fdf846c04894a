"""The cache of one layer whose tokens all stay in DRAM, in blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hetero_kv.engine.sequence_layer import CacheFullError, PrefillBuffer, SequenceLayer
from hetero_kv.engine.statistics import BLOCK_RECALL
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.store.block_table import BlockTable
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.storage import StorageType

__all__ = ["CacheFullError", "PagedLayer", "PrefillBuffer"]


class PagedLayer(SequenceLayer):
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
        state: what the operator remembers beside the tokens; `checkpoint` copies it, `fork` copies it deeply.

    Attributes:
        forks: forks that the pool has blocks for, to grow to `capacity` beside this layer; set before the first token.
        pool: the blocks; None before the first token.
        rows: a block table per row of the batch.
        window: Initial and Local on the compute device; None where that is the CPU, which reads them from the pool.
        indexed_blocks: blocks from the start of the sequence whose representatives stand in the pool.
    """

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
        super().__init__(capacity, storage)
        self.block_size = block_size
        self.initial_blocks = -(-initial_len // block_size)
        self.local_len = local_len
        self.representative_num = representative_num
        self.on_stored = on_stored
        self.keep_received = keep_received
        self.state = state
        self._blank_state = copy.copy(state)
        self.window: DeviceWindow | None = None
        self.indexed_blocks = 0

    # -- what transformers asks of a cache layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pool, once the shapes are known: keys [batch, kv_heads, tokens, k_dim], values likewise."""
        batch, kv_heads, _, k_dim = key_states.shape
        per_row = -(-self.capacity // self.block_size)
        self.pool = BlockPool(
            batch * per_row * (1 + self.forks),
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

    @property
    def stored_length(self) -> int:
        """See SequenceLayer."""
        return self.rows[0].length if self.rows else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        self._truncate(self.get_seq_length() - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget every token and give the memory back; blocks that forks hold too stay with them."""
        for row in self.rows:
            row.free()
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
    def context_blocks(self) -> int:
        """Blocks of the Context. A function of the length alone."""
        return max(0, (self.get_seq_length() - self.local_len) // self.block_size - self.initial_blocks)

    @property
    def context_end(self) -> int:
        """Index of the block at which Local begins."""
        return min(self.initial_blocks, self.rows[0].num_blocks) + self.context_blocks

    # -- storing tokens

    @property
    def room(self) -> int:
        """Tokens that can still be added to every row: up to `capacity`, and what forks have left of the pool."""
        room = self.capacity - self.get_seq_length()
        if self.pool is None or not self.pool.is_shared:
            return room
        # What is written to: a last block that is not full, and the received attention of blocks that keep it.
        first = self.rows[0].length // self.block_size
        if self.keep_received:
            first = min(first, self._first_open_block)
        spare = self.pool.free_blocks - self.pool.copies_to_own(self.block_tables[:, first:])
        if spare < 0:
            return 0
        blocks = self.rows[0].num_blocks + spare // len(self.rows)
        return min(room, blocks * self.block_size - self.get_seq_length())

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

    def add_received(self, received: torch.Tensor, start: int) -> None:
        """Add attention that keys received, [batch, kv_heads, tokens] float32 of the positions from `start` on.

        `start` is the first position of a block. Blocks that have their representatives need it no more, and forks
        must not see what this cache's queries looked at: so only the other blocks get it, and a shared one is copied.
        """
        assert self.pool is not None
        assert self.pool.received is not None
        tokens = received.shape[2]
        padded = torch.nn.functional.pad(received, (0, -tokens % self.block_size))
        blocks = padded.unflatten(2, (-1, self.block_size)).transpose(1, 2)
        first = max(start // self.block_size, self._first_open_block)
        for row, added in zip(self.rows, blocks[:, first - start // self.block_size :], strict=True):
            row.own(first, first + len(added))
            ids = torch.from_numpy(row.ids[first : first + len(added)].astype(np.int64))
            self.pool.received[ids] += added

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See SequenceLayer."""
        for index, row in enumerate(self.rows):
            row.gather(keys[index], values[index])

    @property
    def _first_open_block(self) -> int:
        """The first block, from the Context's beginning on, that has no representatives yet."""
        return min(max(self.indexed_blocks, self.initial_blocks), self.rows[0].num_blocks)

    # -- going back, and going two ways

    def fork(self, memo: dict[int, Any]) -> PagedLayer:
        """A second layer with the same tokens, sharing the blocks; `memo` as for copy.deepcopy, one for all layers."""
        twin = copy.copy(self)
        twin.rows = [row.fork() for row in self.rows]
        twin.window = copy.deepcopy(self.window)
        twin.state, twin._blank_state = copy.deepcopy(self.state, memo), copy.deepcopy(self._blank_state, memo)
        return twin

    def checkpoint(self) -> tuple[Any, ...]:
        """What `restore` needs to come back to the present state."""
        if not self.rows:
            return 0, copy.copy(self.state), self.indexed_blocks, 0, None
        first = self._first_open_block
        return self.rows[0].length, copy.copy(self.state), self.indexed_blocks, first, self._received_from(first)

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Forget what was stored since `checkpoint`, and what its queries looked at."""
        length, state, indexed, first, received = checkpoint
        self.state = copy.copy(state)
        self._truncate(length)
        self.indexed_blocks = min(self.indexed_blocks, indexed)
        if received is not None:
            assert self.pool is not None
            assert self.pool.received is not None
            for row, before in zip(self.rows, received, strict=True):
                # A block that others hold was copied before anything was added to it.
                own = [i for i, block in enumerate(row.ids[first:]) if self.pool.references(int(block)) == 1]
                self.pool.received[row.ids[first:][own].astype(np.int64)] = before[own]

    def _received_from(self, first: int) -> list[torch.Tensor] | None:
        """A copy of the attention that the blocks from `first` on have received, per row."""
        if self.pool is None or self.pool.received is None:
            return None
        return [self.pool.received[row.ids[first:].astype(np.int64)] for row in self.rows]

    def _truncate(self, length: int) -> None:
        for row in self.rows:
            row.truncate(length)
        self.indexed_blocks = min(self.indexed_blocks, length // self.block_size)
        self._reload_window()

    def _reload_window(self) -> None:
        if self.window is not None:
            self.window.load(self.rows, self.context_end * self.block_size)

    # -- what others ask

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """See OperatorLayer."""
        return {BLOCK_RECALL.name: getattr(self.state, "recall", None)}


def _needs_window(device: torch.device) -> bool:
    """Whether attention over Initial and Local runs on another device than the pool's."""
    return device.type != "cpu"
