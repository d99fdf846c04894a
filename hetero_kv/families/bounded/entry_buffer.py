"""Memory of a bounded layer's entries, with spare capacity for the next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.cpu_ops.cached_entries import append_token, gather_entries, gather_numbers
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.gpu_ops import cached_entries

#: Spare entries after an eviction: the number of decoded tokens until all entries are moved again.
SLACK = 32

# numpy has no bfloat16; copying kernels use the bits.
_OF_16_BITS = (torch.bfloat16, torch.float16)


class EntryBuffer:
    """Keys, values and positions in order; written from left to right, and never overwritten.

    So whatever refers to its beginning (a checkpoint, a fork) stays valid. If several users append at the same place,
    the first writes here, and the others move.

    Attributes:
        keys, values: [batch, kv_heads, capacity, dim], contiguous.
        positions: [batch, kv_heads, capacity] int64, contiguous.
        rotated_keys: keys rotated to their positions in the cache; None if the policy does not re-index positions, or
            before they are attended to.
        taken: number of entries written.
        arrays: keys, values and positions as kernel arrays, with 16-bit numbers as their bits; None if kernels cannot
            access them.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, taken: int) -> None:
        self.keys, self.values, self.positions, self.taken = keys, values, positions, taken
        self.rotated_keys: torch.Tensor | None = None
        self.arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if keys.device.type == "cpu":
            self.arrays = _bits(keys), _bits(values), positions.numpy()

    @classmethod
    def empty(cls, like: EntryBuffer, capacity: int, taken: int) -> EntryBuffer:
        """Capacity for `capacity` entries of the shape of `like`'s; the first `taken` of them are to be written."""
        batch, kv_heads, _, k_dim = like.keys.shape
        return cls(
            like.keys.new_empty(batch, kv_heads, capacity, k_dim),
            like.values.new_empty(batch, kv_heads, capacity, like.values.shape[3]),
            like.positions.new_empty(batch, kv_heads, capacity),
            taken,
        )

    def moved(self, cached: int, tokens: int) -> EntryBuffer:
        """A copy of the first `cached` entries, with capacity for `tokens` more."""
        copied = EntryBuffer.empty(self, cached + tokens, cached)
        for new, old in ((copied.keys, self.keys), (copied.values, self.values), (copied.positions, self.positions)):
            new[:, :, :cached] = old[:, :, :cached]
        return copied

    def gathered(
        self, index: torch.Tensor, scores: Sequence[torch.Tensor] = ()
    ) -> tuple[EntryBuffer, list[torch.Tensor]]:
        """A copy of the entries at `index` [batch or 1, kv_heads or 1, count] int64, with SLACK spare entries.

        Also returns their numbers in each of `scores` [batch, kv_heads, cached or fewer], 0 for entries beyond these.
        """
        count = index.shape[2]
        target = EntryBuffer.empty(self, count + SLACK, count)
        if self.arrays is None:
            return target, cached_entries.keep(self._parts, scores, index, target._parts)
        assert target.arrays is not None
        where = index.numpy()
        gather_entries(self.arrays, where, target.arrays, kernel_threads())
        behind = (self.taken - each.shape[2] for each in scores)
        padded = (torch.nn.functional.pad(s, (0, new)) if new > 0 else s for s, new in zip(scores, behind, strict=True))
        return target, [torch.from_numpy(gather_numbers(each.numpy(), where)) for each in padded]

    def is_free_behind(self, cached: int, tokens: int) -> bool:
        """Whether the first `cached` entries are all that is written, and `tokens` more fit."""
        return cached == self.taken <= self.positions.shape[2] - tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        """Append tokens [batch, kv_heads, n, dim]; the first has `position` in its sequence."""
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
        """Memory, bytes, spare capacity included."""
        parts = [self.keys, self.values, self.positions, *([] if self.rotated_keys is None else [self.rotated_keys])]
        return sum(part.numel() * part.element_size() for part in parts)


def kernel_threads() -> int:
    """The number of torch's threads, at most that of the kernels."""
    return at_most(torch.get_num_threads())


def _bits(numbers: torch.Tensor) -> np.ndarray:
    if numbers.dtype in _OF_16_BITS:
        numbers = numbers.view(torch.int16)
    return numbers.numpy()
