"""A copy of a sequence's Initial and Local parts on the compute device, if that is not the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.gpu_ops.attention import attention_with_lse, folded_heads, unfolded_heads
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.merge import merge_attention
from hetero_kv.gpu_ops.window_step import take_token
from hetero_kv.store.pool import BlockPool


class DeviceWindow:
    """Initial tokens in fixed slots, Local tokens in a ring buffer; the pool in DRAM has all of them as well.

    Args:
        initial: tokens of Initial, in whole blocks.
        local_len: minimum tokens of Local; up to a block more stay until that block enters the Context.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    #: Whether the query is scored with `keys` alone; a subclass may have a second vector per key.
    is_plain = True

    def __init__(
        self, initial: int, local_len: int, block_size: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        self.initial = initial
        self.ring = local_len + block_size
        capacity = initial + self.ring
        self.keys = like_keys.new_zeros(*like_keys.shape[:2], capacity, like_keys.shape[3])
        self.values = like_values.new_zeros(*like_values.shape[:2], capacity, like_values.shape[3])
        self._length = 0
        self._local_start = 0
        self._loads = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor, local_start: int) -> None:
        """Add one token per row, keys [batch, kv_heads, 1, dim]; Local now begins at position `local_start`."""
        slot = self._slot(self._length)
        self.keys[:, :, slot : slot + 1] = keys
        self.values[:, :, slot : slot + 1] = values
        self.advance(local_start)

    def advance(self, local_start: int) -> None:
        """Count a token per row that a kernel appends; Local now begins at position `local_start`."""
        self._length += 1
        self._local_start = local_start

    def take(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local_start: int, scale: float, softcap: float | None,
        sent: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:  # fmt: skip
        """`append` and `attend` in one launch, which also writes to `sent` (see `gpu_ops.window_step.take_token`)."""
        slot = self._slot(self._length)
        self.advance(local_start)
        slots = self._occupied()
        (first, first_count), (second, second_count) = (
            (part.start, part.stop - part.start) for part in (slots[0], slots[-1])
        )
        runs = first, first_count, second, second_count if len(slots) > 1 else 0
        return take_token(q, k, v, self.keys, self.values, slot, runs, scale, softcap, sent)

    def load(self, pool: BlockPool, ids: Sequence[np.ndarray] | np.ndarray, length: int, local_start: int) -> None:
        """Reload Initial and Local of every row from the pool, after a prefill or a rollback.

        Args:
            ids: per row, the blocks of its `length` tokens.
        """
        self._length, self._local_start = length, local_start
        self._loads += 1
        for positions in (range(min(self.initial, self._length)), range(max(local_start, self.initial), self._length)):
            if not positions:
                continue
            at = torch.arange(positions.start, positions.stop, device=self.keys.device)
            slots = self._slots(at)
            for index, blocks in enumerate(ids):
                read = pool.read(blocks, positions.start, positions.stop)
                keys, values = (on_device(part, self.keys.device) for part in read)
                self.keys[index, :, slots] = keys.to(self.keys)
                self.values[index, :, slots] = values.to(self.values)

    @property
    def mark(self) -> tuple[int, int, int]:
        """The present state, for `go_back`."""
        return self._loads, self._length, self._local_start

    def go_back(self, mark: tuple[int, int, int]) -> bool:
        """Return to the state at `mark`, bit for bit, if at most one token has been appended since.

        That token went to a free slot: the ring is one block longer than Local. Returns False if the window must be
        reloaded instead.
        """
        loads, length, local_start = mark
        if loads != self._loads or not length <= self._length <= length + 1:
            return False
        self._length, self._local_start = length, local_start
        return True

    def selected(self, rows: list[int]) -> DeviceWindow:
        """A new window, whose row i is a copy of row `rows[i]`."""
        new = copy.copy(self)
        # Slices, because indexing with a list would copy it to the device, and the host would wait for that.
        new.keys, new.values = (torch.cat([part[row : row + 1] for row in rows]) for part in (self.keys, self.values))
        return new

    def attend(self, q: torch.Tensor, scale: float, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query per head to Initial and Local.

        Args:
            q: [batch, kv_heads * group, 1, k_dim].

        Returns (out [batch, kv_heads * group, 1, v_dim], lse [batch, kv_heads * group, 1] float32).
        """
        folded = folded_heads(q, self.keys.shape[1])
        parts = (
            attention_with_lse(folded, self.keys[:, :, part], self.values[:, :, part], scale, softcap)
            for part in self._occupied()
        )
        return unfolded_heads(q, *functools.reduce(lambda before, part: merge_attention(*before, *part), parts))

    def attended(self, q: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What `attend` attends to, of the first row, in parts.

        Each is a query as `q`, keys [kv_heads, n, k_dim], and their positions [n].
        """
        positions = self._positions(0, self._length)
        return [(q, self.keys[0, :, self._slots(positions)], positions)]

    def _positions(self, begin: int, end: int) -> torch.Tensor:
        """The positions from `begin` up to `end` that the window has."""
        at = torch.arange(begin, min(end, self._length), device=self.keys.device)
        return at[(at < self.initial) | (at >= self._local_start)]

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        in_ring = self.initial + (positions - self.initial) % self.ring
        return torch.where(positions < self.initial, positions, in_ring)

    @property
    def nbytes(self) -> int:
        """Memory of the window on the device, bytes."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))

    def _slot(self, position: int) -> int:
        return position if position < self.initial else self.initial + (position - self.initial) % self.ring

    def _occupied(self) -> list[slice]:
        """The occupied slots, in as few slices as possible: those of Initial, and those of the ring, which may wrap."""
        start = max(self._local_start, self.initial)
        first, count = self._slot(start), max(0, self._length - start)
        stop, end = first + count, self.initial + self.ring
        parts = [(0, min(self.initial, self._length)), (self.initial, stop - self.ring), (first, min(stop, end))]
        slots: list[slice] = []
        for begin, behind in parts:
            if behind <= begin:
                continue
            if slots and slots[-1].stop == begin:
                begin = slots.pop().start
            slots.append(slice(begin, behind))
        return slots
