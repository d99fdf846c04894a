"""The cache layer of Self-Extend: a retrieval layer whose blocks store keys at grouped positions."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.self_extend.positions import GroupedPositions
from hetero_kv.families.self_extend.settings import SharedPositionSettings
from hetero_kv.families.self_extend.window import GroupedWindow
from hetero_kv.store.pool import BlockPool


class SelfExtendLayer(RetrievalLayer):
    """Blocks with keys at grouped positions; a separate window has Initial and Local, which includes all neighbours.

    Attributes:
        rotary: the rotation of every position so far; None before the first token.
    """

    window: GroupedWindow | None

    def __init__(self, layout: RetrievalLayout, settings: SharedPositionSettings, derived: Derived) -> None:
        super().__init__(layout, settings, derived)
        self.positions = GroupedPositions(*settings.shared_positions)
        self.rotary: RotaryTable | None = None

    def reset(self) -> None:
        super().reset()
        self.rotary = None

    def _prepare(self, keys: torch.Tensor, values: torch.Tensor) -> BlockPool:
        pool = super()._prepare(keys, values)
        if not isinstance(self.window, GroupedWindow):
            assert self.rotary is not None
            sizes = self.layout.sink_blocks * self.layout.block_size, self.layout.local_len, self.layout.block_size
            self.window = GroupedWindow(self.positions, self.rotary, *sizes, keys, values)
        return pool

    @property
    def tokens_in_pieces(self) -> int:
        """See GpuPrefillCache. The buffer also loads Local, which has all neighbours of the prompt's first token."""
        size, length = self.layout.block_size, self.group.length
        return max(0, min(self.context_end, (length - self.positions.neighbours) // size)) * size

    def _loaded_buffer(self, keys: torch.Tensor, values: torch.Tensor) -> PrefillBuffer:
        """See GpuPrefillCache; the buffer includes Local."""
        buffer = super()._loaded_buffer(keys, values)
        if keys.is_cuda and buffer.first < buffer.past:
            for first, stored_keys, stored_values in self._pieces_between(buffer.first, buffer.past, keys):
                part = slice(first - buffer.first, first - buffer.first + stored_keys.shape[2])
                buffer.keys[:, :, part], buffer.values[:, :, part] = stored_keys, stored_values
        return buffer

    def record_neighbours(self, q: torch.Tensor, start: int, keys: torch.Tensor, first: int) -> None:
        """Hook that a chunk's attention to neighbours calls, with queries and keys rotated to their own positions.

        Args:
            q: [batch, heads, n, k_dim], for the positions from `start` on.
            keys: [batch, kv_heads, m, k_dim], for the positions from `first` on: the queries' neighbours.
        """

    def fork(self, memo: dict[int, Any]) -> SelfExtendLayer:
        forked = self._copied()
        forked.rotary = copy.deepcopy(self.rotary, memo)
        if self.window is not None and forked.rotary is not None:
            forked.window = self.window.fork(forked.rotary)
        return forked

    def saved(self) -> SavedPart:
        part = super().saved()
        if self.rotary is not None:
            part.shared["rotary"] = self.rotary
        return part

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        dim, device = target.keys.shape[3], target.keys.device
        self.rotary = target.shared(part, "rotary", lambda saved: RotaryTable.restored(saved, dim, device))
        if self.rotary is None or len(self.rotary) < self.group.length:
            raise part.wrong("the rotation of some tokens is missing")
        super().restore(part, target)

    def after_restore(self, part: SavedPart) -> None:
        super().after_restore(part)
        if self.window is not None:
            self.window.restore_own_keys()

    @property
    def tables_shared_with_others(self) -> tuple[Any, ...]:
        return () if self.rotary is None else (self.rotary,)

    @property
    def dram_bytes(self) -> int:
        return self._window_bytes(on_cpu=True)

    @property
    def device_bytes(self) -> int:
        return self._window_bytes(on_cpu=False)

    def _window_bytes(self, *, on_cpu: bool) -> int:
        window = self.window
        return 0 if window is None or (window.keys.device.type == "cpu") != on_cpu else window.nbytes
