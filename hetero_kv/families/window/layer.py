"""The cache layer of the model's own sliding-window attention: the window's tokens, and no older ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Rows
from typing import Any

import torch

from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.statistics import READ_BYTES, Tally
from hetero_kv.engine.step import Step
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES

_Snapshot = tuple[torch.Tensor | None, torch.Tensor | None, int, int, int, Tally]


class WindowLayer(FamilyLayer):
    """The last `window - 1` keys and values on the compute device, in a buffer with slack.

    New tokens are written after the old ones. A full buffer is replaced by a new one, to which the window is copied; so
    the window is copied only once in many steps.

    Args:
        window: keys that a query sees, itself included (the model's `sliding_window`).
    """

    is_sliding = True
    can_crop = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._start = self._end = 0
        self._length = 0
        self._prefilling = False

    def get_seq_length(self) -> int:
        """Tokens seen by this layer."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the attention mask for `query_length` new tokens."""
        cached = min(self._length, self.window - 1)
        return cached + query_length, self._length - cached

    def get_max_length(self) -> int:
        """The window's size in tokens."""
        return self.window

    def reset(self) -> None:
        """Drop all tokens."""
        self.rollback((None, None, 0, 0, 0, Tally()))

    def select(self, rows: Rows[int]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[list(rows)], self.values[list(rows)]

    def begin_prefill(self, step: Step) -> None:
        """See FamilyLayer: a window needs no preparation."""
        self._prefilling = True

    def leave_prefill(self) -> None:
        self._prefilling = False
        self._shed_slack()

    @property
    def is_prefilling(self) -> bool:
        """Whether a prompt is being prefilled in this layer."""
        return self._prefilling

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new tokens and return all keys and values that their queries may see.

        Args:
            keys: [batch, kv_heads, tokens, k_dim].
            values: [batch, kv_heads, tokens, v_dim].

        Returns keys and values [batch, kv_heads, cached + tokens, dim]: up to `window - 1` older tokens, then the new
        ones.
        """
        seen = self.make_room(keys, values)
        assert self.keys is not None
        assert self.values is not None
        own = slice(seen.stop - keys.shape[2], seen.stop)
        self.keys[:, :, own], self.values[:, :, own] = keys, values
        return self.keys[:, :, seen], self.values[:, :, seen]

    def make_room(self, keys: torch.Tensor, values: torch.Tensor) -> slice:
        """As `extend`, but the new tokens' room is left to be written.

        Returns the range in the buffers of all tokens that the new ones may see; it ends with these.
        """
        tokens = keys.shape[2]
        start = max(self._start, self._end - (self.window - 1))
        if not self.has_room(tokens):
            self.keys = self._moved(self.keys, keys, start)
            self.values = self._moved(self.values, values, start)
            start, self._end = 0, self._end - start
        self._start, self._end = start, self._end + tokens
        self._length += tokens
        return slice(start, self._end)

    def has_room(self, tokens: int) -> bool:
        """Whether the buffers have room for so many new tokens, and need not be replaced."""
        return self.keys is not None and self._end + tokens <= self.keys.shape[2]

    def holds(self, dtype: Any) -> bool:
        """Whether there are tokens, in DRAM, in contiguous buffers that are arrays of `dtype` (`ARRAY_DTYPES`)."""
        keys, values = self.keys, self.values
        return (
            keys is not None
            and values is not None
            and all(
                each.device.type == "cpu" and each.is_contiguous() and ARRAY_DTYPES.get(each.dtype) is dtype
                for each in (keys, values)
            )
        )

    def fork(self, memo: dict[int, Any]) -> WindowLayer:
        """A second layer with a copy of the tokens in a separate buffer, so that both can append to theirs."""
        forked = copy.copy(self)
        forked._move_window()
        return forked

    def _shed_slack(self) -> None:
        """Move the window to a smaller buffer if long chunks have made the present one large."""
        if self.keys is not None and self.keys.shape[2] > 2 * self.window:
            self._move_window()

    def _move_window(self) -> None:
        """Move the window to a new buffer."""
        if self.keys is None or self.values is None:
            return
        start = max(self._start, self._end - (self.window - 1))
        nothing = (slice(None), slice(None), slice(0, 0))
        self.keys = self._moved(self.keys, self.keys[nothing], start)
        self.values = self._moved(self.values, self.values[nothing], start)
        self._start, self._end = 0, self._end - start

    def _moved(self, old: torch.Tensor | None, new: torch.Tensor, start: int) -> torch.Tensor:
        """A new buffer that begins with `old[start:end]` and has capacity for `new` and another window of tokens."""
        cached = self._end - start
        buffer = new.new_empty(*new.shape[:2], cached + new.shape[2] + self.window, new.shape[3])
        if old is not None:
            buffer[:, :, :cached] = old[:, :, start : self._end]
        return buffer

    def snapshot(self) -> _Snapshot:
        return self.keys, self.values, self._start, self._end, self._length, self.read

    def rollback(self, snapshot: _Snapshot) -> None:
        """See FamilyLayer. The snapshot's tokens are still intact, because tokens are only ever written after them."""
        self.keys, self.values, self._start, self._end, self._length, self.read = snapshot

    def can_crop_to(self, length: int) -> bool:
        """Whether no token has left the window, which is all that forks have."""
        return self._length < self.window or length >= self._length

    def crop(self, length: int) -> None:
        """See FamilyLayer. The window moves to a new buffer, because snapshots may refer to the dropped tokens."""
        self._end -= self._length - length
        self._length, self._start = length, max(0, self._end - (self.window - 1))
        self._move_window()

    def checkpoint(self) -> LayerCheckpoint:
        start = max(self._start, self._end - (self.window - 1))
        parts = [None if part is None else part[:, :, start : self._end].clone() for part in (self.keys, self.values)]
        state = (*parts, 0, self._end - start, self._length, self.read)
        return LayerCheckpoint(state, sum(part.nbytes for part in parts if part is not None))

    def return_to(self, checkpoint: LayerCheckpoint) -> None:
        self.rollback(checkpoint.state)
        # Moving adds the slack that new tokens are written to.
        self._move_window()

    def saved(self) -> SavedPart:
        part = SavedPart(numbers={"seen": self._length, "read": list(self.read)})
        if self.keys is not None and self.values is not None:
            cached = slice(max(self._start, self._end - (self.window - 1)), self._end)
            part.put(keys=self.keys[:, :, cached], values=self.values[:, :, cached])
        return part

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        length = part.integer("seen", self.group.length, self.group.length)
        cached, read = min(length, self.window - 1), part.tally("read")
        keys, values = part.like("keys", target.keys, cached), part.like("values", target.values, cached)
        self.rollback((keys, values, 0, cached, length, read))
        # Moving adds the slack that new tokens are written to.
        self._move_window()

    @property
    def statistics(self) -> dict[str, float | int | None]:
        return {READ_BYTES.name: self.read.mean}

    @property
    def dram_bytes(self) -> int:
        """Bytes of the window's buffer if it is in DRAM, else 0."""
        return self._bytes_on(True)

    @property
    def device_bytes(self) -> int:
        """Bytes of the window's buffer if it is on a device, else 0."""
        return self._bytes_on(False)

    def _bytes_on(self, cpu: bool) -> int:
        parts = [part for part in (self.keys, self.values) if part is not None and (part.device.type == "cpu") == cpu]
        return sum(part.numel() * part.element_size() for part in parts)
