"""Memory that is allocated once and reused for different tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# Alignment of tensors, sufficient for all dtypes, bytes.
_ALIGNED = 16
Kind = tuple[tuple[int, ...], torch.dtype]


def bytes_of(kinds: Iterable[Kind]) -> int:
    """Bytes that tensors of these shapes and dtypes take side by side."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in kinds)


def tensors_in(room: torch.Tensor, kinds: Iterable[Kind]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes, side by side in `room`, uint8 of at least `bytes_of` them."""
    found, start = [], 0
    for shape, dtype in kinds:
        size = math.prod(shape) * dtype.itemsize
        found.append(room[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class PinnedBytes:
    """A buffer in page-locked DRAM that grows as required."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def like(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Buffers of the shapes and dtypes of `tensors`, which replace earlier ones in the same memory."""
        return self.of([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])

    def of(self, kinds: list[Kind]) -> list[torch.Tensor]:
        """As `like`, for shapes and dtypes."""
        room = bytes_of(kinds)
        if self._bytes is None or len(self._bytes) < room:
            self._bytes = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        return tensors_in(self._bytes, kinds)
