"""Memory of a bounded layer's entries, with room behind them for the tokens that come next."""

from __future__ import annotations

import torch

#: Entries that there is room for behind those that stay: tokens that are decoded until all are moved again.
SLACK = 32


class EntryRoom:
    """Keys and values in the order of their positions, written to from left to right, and never twice.

    So what refers to its beginning (a checkpoint, a fork) stays as it is. Of several that would go on from the same
    place the first has the room, and the others move.

    Attributes:
        keys, values: [batch, kv_heads, capacity, dim].
        placed: the keys rotated to their places, where a policy re-indexes positions and they have been attended to.
        taken: entries that were written.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, taken: int) -> None:
        self.keys, self.values, self.taken = keys, values, taken
        self.placed: torch.Tensor | None = None

    @classmethod
    def around(cls, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> EntryRoom:
        """A copy of `keys` and `values` [batch, kv_heads, held, dim], with room for `tokens` behind them."""
        held = keys.shape[2]
        new_keys, new_values = (old.new_empty(*old.shape[:2], held + tokens, old.shape[3]) for old in (keys, values))
        new_keys[:, :, :held], new_values[:, :, :held] = keys, values
        return cls(new_keys, new_values, held)

    @classmethod
    def gathered(cls, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor) -> EntryRoom:
        """A copy of the entries at `index` [batch, kv_heads, count], with SLACK behind them."""
        padded = torch.nn.functional.pad(index, (0, SLACK))
        return cls(_rows(keys, padded), _rows(values, padded), index.shape[2])

    def has(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether `keys` and `values` are what lies here first."""
        return keys.data_ptr() == self.keys.data_ptr() and values.data_ptr() == self.values.data_ptr()

    def is_free_behind(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> bool:
        """Whether `keys` and `values` are all that lies here, and `tokens` more have room behind them."""
        return self.has(keys, values) and keys.shape[2] == self.taken <= self.keys.shape[2] - tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write tokens [batch, kv_heads, n, dim] behind what is there."""
        new = slice(self.taken, self.taken + keys.shape[2])
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        self.taken = new.stop

    @property
    def nbytes(self) -> int:
        """Memory, bytes, with what is not taken yet."""
        parts = (self.keys, self.values) if self.placed is None else (self.keys, self.values, self.placed)
        return sum(part.numel() * part.element_size() for part in parts)


def _rows(stored: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The vectors [batch, kv_heads, count, dim] of `stored` [batch, kv_heads, held, dim] at `index`."""
    batch, kv_heads, held, dim = stored.shape
    step = stored.stride(1) // dim if dim else held
    if stored.stride() != (kv_heads * step * dim, step * dim, dim, 1):
        stored, step = stored.contiguous(), held
    # Ten times as fast as gather, which looks up every number of a vector by itself.
    heads = batch * kv_heads
    flat = stored.as_strided(((heads - 1) * step + held, dim), (dim, 1))
    first = torch.arange(heads, device=index.device).view(batch, kv_heads, 1) * step
    return flat.index_select(0, (index + first).flatten()).view(batch, kv_heads, index.shape[2], dim)
