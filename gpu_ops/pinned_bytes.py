"""Page-locked memory that is made once and holds other tensors every time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# Where a tensor begins, for numbers of any kind.
_ALIGNED = 16
Kind = tuple[tuple[int, ...], torch.dtype]


class PinnedBytes:
    """Room in page-locked DRAM that grows as it must."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def like(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Room for tensors of these shapes and dtypes, in the place of what was there."""
        return self.of([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])

    def of(self, kinds: list[Kind]) -> list[torch.Tensor]:
        """As `like`, for shapes and dtypes."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        room = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
        if self._bytes is None or len(self._bytes) < room:
            self._bytes = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        found, start = [], 0
        for (shape, dtype), size in zip(kinds, sizes, strict=True):
            found.append(self._bytes[start : start + size].view(dtype).view(shape))
            start += -(-size // _ALIGNED) * _ALIGNED
        return found
