"""The cache of one of the model's own sliding-window layers: the window, and nothing older."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetero_kv.engine.operator_layer import OperatorLayer

_Checkpoint = tuple[torch.Tensor | None, torch.Tensor | None, int, int, int]


class WindowLayer(OperatorLayer):
    """The last `window - 1` keys and values on the compute device, in a buffer with slack.

    New tokens are written behind the old ones; when the buffer is full, the window moves into a new one, so that
    adding a token copies the window only once in many steps.

    Args:
        window: keys that a query sees, itself included (the model's `sliding_window`).
    """

    is_sliding = True
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._start = self._end = 0
        self._length = 0
        self._prefilling = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first tokens make the buffer."""
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens seen by this layer."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of the mask that `query_length` new tokens would need."""
        held = min(self._length, self.window - 1)
        return held + query_length, self._length - held

    def get_max_length(self) -> int:
        """The window, tokens."""
        return self.window

    def reset(self) -> None:
        """Forget every token."""
        self.restore((None, None, 0, 0, 0))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i continue row `beam_idx[i]` (beam search)."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """A prefill of `tokens` tokens in chunks: a window needs no preparation."""
        self._prefilling = True
        try:
            yield
        finally:
            self._prefilling = False
            self._shed_slack()

    @property
    def is_prefilling(self) -> bool:
        """Whether a `prefill` context is open."""
        return self._prefilling

    def require_room(self, tokens: int) -> None:
        """A window has room for any number of tokens."""

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new tokens and return all that their queries may see.

        Args:
            keys: [batch, kv_heads, tokens, k_dim].
            values: [batch, kv_heads, tokens, v_dim].

        Returns keys and values [batch, kv_heads, held + tokens, dim]: up to `window - 1` older tokens, then the new.
        """
        tokens = keys.shape[2]
        start = max(self._start, self._end - (self.window - 1))
        if self.keys is None or self.values is None or self._end + tokens > self.keys.shape[2]:
            self.keys = self._moved(self.keys, keys, start)
            self.values = self._moved(self.values, values, start)
            start, self._end = 0, self._end - start
        end = self._end + tokens
        self.keys[:, :, self._end : end] = keys
        self.values[:, :, self._end : end] = values
        self._start, self._end = start, end
        self._length += tokens
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def fork(self, memo: dict[int, Any]) -> WindowLayer:
        """A second layer with the same tokens, in a buffer of its own: both go on writing behind them."""
        twin = copy.copy(self)
        twin._move_window()
        return twin

    def _shed_slack(self) -> None:
        """Move the window out of a buffer that long chunks have made large."""
        if self.keys is not None and self.keys.shape[2] > 2 * self.window:
            self._move_window()

    def _move_window(self) -> None:
        """Move the window into a new buffer."""
        if self.keys is None or self.values is None:
            return
        start = max(self._start, self._end - (self.window - 1))
        nothing = (slice(None), slice(None), slice(0, 0))
        self.keys = self._moved(self.keys, self.keys[nothing], start)
        self.values = self._moved(self.values, self.values[nothing], start)
        self._start, self._end = 0, self._end - start

    def _moved(self, old: torch.Tensor | None, new: torch.Tensor, start: int) -> torch.Tensor:
        """A new buffer that begins with `old[start:end]` and has room for `new` and as many tokens as the window."""
        held = self._end - start
        buffer = new.new_empty(*new.shape[:2], held + new.shape[2] + self.window, new.shape[3])
        if old is not None:
            buffer[:, :, :held] = old[:, :, start : self._end]
        return buffer

    def checkpoint(self) -> _Checkpoint:
        """What `restore` needs to come back to the present state."""
        return self.keys, self.values, self._start, self._end, self._length

    def restore(self, checkpoint: _Checkpoint) -> None:
        """Forget what was added since `checkpoint`: tokens are only ever written behind those that it holds."""
        self.keys, self.values, self._start, self._end, self._length = checkpoint

    @property
    def dram_bytes(self) -> int:
        """Bytes of the window's buffer."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if t is not None)
