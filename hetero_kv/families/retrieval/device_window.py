"""A copy of a sequence's Initial and Local part on the compute device, where that is not the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from gpu_ops.attention import tiled_attention
from hetero_kv.store.pool import BlockPool


class DeviceWindow:
    """Initial tokens in fixed slots, Local tokens in a ring; the pool in DRAM holds all of them too.

    Args:
        initial: tokens of Initial, whole blocks.
        local_len: tokens of Local at least; up to a block more stay until that block enters the Context.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    def __init__(
        self, initial: int, local_len: int, block_size: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        self.initial = initial
        self.ring = local_len + block_size
        capacity = initial + self.ring
        self.keys = like_keys.new_zeros(*like_keys.shape[:2], capacity, like_keys.shape[3])
        self.values = like_values.new_zeros(*like_values.shape[:2], capacity, like_values.shape[3])
        self._slots = torch.arange(capacity, device=like_keys.device)
        self._length = 0
        self._local_start = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor, local_start: int) -> None:
        """Add one token per row, keys [batch, kv_heads, 1, dim]; Local now begins at position `local_start`."""
        slot = self._slot(self._length)
        self.keys[:, :, slot : slot + 1] = keys
        self.values[:, :, slot : slot + 1] = values
        self._length += 1
        self._local_start = local_start

    def load(self, pool: BlockPool, ids: Sequence[np.ndarray] | np.ndarray, length: int, local_start: int) -> None:
        """Take both parts of every row from the pool anew, after a prefill or a step back.

        Args:
            ids: per row, the blocks of its `length` tokens.
        """
        self._length, self._local_start = length, local_start
        for positions in (range(min(self.initial, self._length)), range(max(local_start, self.initial), self._length)):
            if not positions:
                continue
            at = torch.arange(positions.start, positions.stop, device=self.keys.device)
            slots = torch.where(at < self.initial, at, self.initial + (at - self.initial) % self.ring)
            for index, blocks in enumerate(ids):
                keys, values = pool.read(blocks, positions.start, positions.stop)
                self.keys[index, :, slots] = keys.to(self.keys)
                self.values[index, :, slots] = values.to(self.values)

    def selected(self, rows: list[int]) -> DeviceWindow:
        """A window of its own with row i what row `rows[i]` was."""
        twin = copy.copy(self)
        twin.keys, twin.values = self.keys[rows], self.values[rows]
        return twin

    def attend(self, q: torch.Tensor, scale: float, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query per head to Initial and Local.

        Args:
            q: [batch, kv_heads * group, 1, k_dim].

        Returns (out [batch, kv_heads * group, 1, v_dim], lse [batch, kv_heads * group, 1] float32).
        """
        batch, heads, _, k_dim = q.shape
        kv_heads = self.keys.shape[1]
        folded = q.reshape(batch, kv_heads, heads // kv_heads, k_dim)
        mask = self._valid()[None, :].expand(heads // kv_heads, -1)
        out, lse = tiled_attention(folded, self.keys, self.values, scale, softcap, mask)
        return out.reshape(batch, heads, 1, -1), lse.reshape(batch, heads, 1)

    @property
    def nbytes(self) -> int:
        """Memory of the window on the device, bytes."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))

    def _slot(self, position: int) -> int:
        return position if position < self.initial else self.initial + (position - self.initial) % self.ring

    def _valid(self) -> torch.Tensor:
        """[capacity] bool: which slots hold a token of Initial or Local."""
        start, held = max(self._local_start, self.initial), max(0, self._length - self.initial)
        offset = (self._slots - self.initial - (start - self.initial)) % self.ring
        in_local = (self._slots >= self.initial) & (offset < held - (start - self.initial))
        return (self._slots < min(self.initial, self._length)) | in_local
