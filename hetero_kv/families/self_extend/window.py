"""Initial and Local of a sequence with grouped positions, on the compute device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.self_extend.positions import GroupedPositions
from hetero_kv.gpu_ops.attention import attention_with_lse, folded_heads, unfolded_heads
from hetero_kv.gpu_ops.merge import merge_attention
from hetero_kv.store.pool import BlockPool


class GroupedWindow(DeviceWindow):
    """A DeviceWindow with keys at grouped positions, plus the same keys at their own positions.

    Args:
        rotary: the rotation of every position of the sequence.
    """

    is_plain = False

    def __init__(
        self,
        positions: GroupedPositions,
        rotary: RotaryTable,
        initial: int,
        local_len: int,
        block_size: int,
        like_keys: torch.Tensor,
        like_values: torch.Tensor,
    ) -> None:
        super().__init__(initial, local_len, block_size, like_keys, like_values)
        self.positions, self.rotary = positions, rotary
        self.own_keys = torch.zeros_like(self.keys)

    def append(self, keys: torch.Tensor, values: torch.Tensor, local_start: int) -> None:
        slot, position = self._slot(self._length), self._length
        super().append(keys, values, local_start)
        self.own_keys[:, :, slot : slot + 1] = self.positions.neighbouring_keys(keys, position, self.rotary)

    def load(self, pool: BlockPool, ids: Sequence[np.ndarray] | np.ndarray, length: int, local_start: int) -> None:
        super().load(pool, ids, length, local_start)
        self.restore_own_keys()

    def restore_own_keys(self) -> None:
        """Compute the keys at their own positions from those at grouped positions."""
        for first, part in self._occupied_between(0, self._length):
            grouped = self.keys[:, :, part]
            self.own_keys[:, :, part] = self.positions.neighbouring_keys(grouped, first, self.rotary)

    def selected(self, rows: list[int]) -> GroupedWindow:
        new = super().selected(rows)
        assert isinstance(new, GroupedWindow)
        new.own_keys = torch.cat([self.own_keys[row : row + 1] for row in rows])
        return new

    def fork(self, rotary: RotaryTable) -> GroupedWindow:
        """A copy of the window, which rotates by `rotary`."""
        new = copy.copy(self)
        new.keys, new.values, new.own_keys = (part.clone() for part in (self.keys, self.values, self.own_keys))
        new.rotary = rotary
        return new

    def attend(self, q: torch.Tensor, scale: float, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As in DeviceWindow, for the newest token's query, at its grouped position."""
        newest = self._length - 1
        near = max(0, self._length - self.positions.neighbours)
        own = self.positions.neighbouring_queries(q, newest, self.rotary)
        found = []
        for query, keys, begin, end in ((q, self.keys, 0, near), (own, self.own_keys, near, self._length)):
            folded = folded_heads(query, self.keys.shape[1])
            found += [
                attention_with_lse(folded, keys[:, :, part], self.values[:, :, part], scale, softcap)
                for _, part in self._occupied_between(begin, end)
            ]
        return unfolded_heads(q, *functools.reduce(lambda before, part: merge_attention(*before, *part), found))

    def attended(self, q: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As in DeviceWindow: far keys at grouped positions, then neighbours at their own."""
        near = max(0, self._length - self.positions.neighbours)
        own = self.positions.neighbouring_queries(q, self._length - 1, self.rotary)
        parts = (q, self.keys, self._positions(0, near)), (own, self.own_keys, self._positions(near, self._length))
        return [(query, keys[0, :, self._slots(positions)], positions) for query, keys, positions in parts]

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.own_keys.numel() * self.own_keys.element_size()

    def _occupied_between(self, begin: int, end: int) -> list[tuple[int, slice]]:
        """The slots of positions [begin, end) that the window has, by runs: (first position, slots) each."""
        start = max(self._local_start, self.initial)
        runs = [(begin, min(end, self.initial, self._length))]
        first, stop = max(begin, start), min(end, self._length)
        # The ring wraps at the next position whose slot is the ring's first.
        turn = first + self.ring - (first - self.initial) % self.ring
        runs += [(first, min(stop, turn)), (max(first, turn), stop)]
        return [(run, slice(self._slot(run), self._slot(run) + behind - run)) for run, behind in runs if behind > run]
