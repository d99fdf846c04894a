"""Memory of a bounded layer's entries, with room behind them for the tokens that come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cpu_ops.cached_entries import append_token, gather_entries, gather_numbers
from cpu_ops.threads import at_most
from gpu_ops import cached_entries

#: Entries that there is room for behind those that stay: tokens that are decoded until all are moved again.
SLACK = 32

# numpy has no bfloat16; kernels that copy need none.
_OF_16_BITS = (torch.bfloat16, torch.float16)


class EntryRoom:
    """Keys, values and positions in order, written to from left to right, and never twice.

    So what refers to its beginning (a checkpoint, a fork) stays as it is. Of several that would go on from the same
    place the first has the room, and the others move.

    Attributes:
        keys, values: [batch, kv_heads, capacity, dim], contiguous.
        positions: [batch, kv_heads, capacity] int64, contiguous.
        rotated_keys: the keys rotated to their positions within the cache, where a policy re-indexes these and they
            have been attended to.
        taken: entries that were written.
        arrays: keys, values and positions as kernels take them, 16-bit numbers as their bits; None where kernels do
            not reach.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, taken: int) -> None:
        self.keys, self.values, self.positions, self.taken = keys, values, positions, taken
        self.rotated_keys: torch.Tensor | None = None
        self.arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if keys.device.type == "cpu":
            self.arrays = _bits(keys), _bits(values), positions.numpy()

    @classmethod
    def empty(cls, like: EntryRoom, capacity: int, taken: int) -> EntryRoom:
        """Room for `capacity` entries of the kind that `like` has, the first `taken` of them yet to be written."""
        batch, kv_heads, _, k_dim = like.keys.shape
        return cls(
            like.keys.new_empty(batch, kv_heads, capacity, k_dim),
            like.values.new_empty(batch, kv_heads, capacity, like.values.shape[3]),
            like.positions.new_empty(batch, kv_heads, capacity),
            taken,
        )

    def moved(self, cached: int, tokens: int) -> EntryRoom:
        """A copy of the first `cached` entries, with room for `tokens` behind them."""
        twin = EntryRoom.empty(self, cached + tokens, cached)
        for new, old in ((twin.keys, self.keys), (twin.values, self.values), (twin.positions, self.positions)):
            new[:, :, :cached] = old[:, :, :cached]
        return twin

    def gathered(
        self, index: torch.Tensor, scores: Sequence[torch.Tensor] = ()
    ) -> tuple[EntryRoom, list[torch.Tensor]]:
        """A copy of the entries at `index` [batch or 1, kv_heads or 1, count] int64, with SLACK behind them.

        And of each of the `scores` [batch, kv_heads, cached or fewer] theirs, 0 for entries behind those.
        """
        count = index.shape[2]
        twin = EntryRoom.empty(self, count + SLACK, count)
        if self.arrays is None:
            return twin, cached_entries.keep(self._parts, scores, index, twin._parts)
        assert twin.arrays is not None
        where = index.numpy()
        gather_entries(self.arrays, where, twin.arrays, kernel_threads())
        behind = (self.taken - each.shape[2] for each in scores)
        padded = (torch.nn.functional.pad(s, (0, new)) if new > 0 else s for s, new in zip(scores, behind, strict=True))
        return twin, [torch.from_numpy(gather_numbers(each.numpy(), where)) for each in padded]

    def is_free_behind(self, cached: int, tokens: int) -> bool:
        """Whether the first `cached` entries are all that lies here, and `tokens` more have room behind them."""
        return cached == self.taken <= self.positions.shape[2] - tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        """Write tokens [batch, kv_heads, n, dim] behind the others, the first of them at `position` of its sequence."""
        new = keys.shape[2]
        if new == 1 and self.arrays is not None:
            append_token(_bits(keys), _bits(values), *self.arrays, self.taken, position)
        elif new == 1:
            cached_entries.append_token(keys, values, self._parts, self.taken, position)
        else:
            behind = slice(self.taken, self.taken + new)
            self.keys[:, :, behind], self.values[:, :, behind] = keys, values
            self.positions[:, :, behind] = torch.arange(position, position + new, device=keys.device)
        self.taken += new

    @property
    def _parts(self) -> cached_entries.Parts:
        return self.keys, self.values, self.positions

    @property
    def nbytes(self) -> int:
        """Memory, bytes, with what is not taken yet."""
        parts = [self.keys, self.values, self.positions, *([] if self.rotated_keys is None else [self.rotated_keys])]
        return sum(part.numel() * part.element_size() for part in parts)


def kernel_threads() -> int:
    """As many threads as torch uses, of those that kernels have."""
    return at_most(torch.get_num_threads())


def _bits(numbers: torch.Tensor) -> np.ndarray:
    if numbers.dtype in _OF_16_BITS:
        numbers = numbers.view(torch.int16)
    return numbers.numpy()
