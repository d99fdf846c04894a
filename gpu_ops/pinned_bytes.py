"""Memory that is made once and holds other tensors every time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# Where a tensor begins, for numbers of any kind.
_ALIGNED = 16
Kind = tuple[tuple[int, ...], torch.dtype]


def bytes_of(kinds: Iterable[Kind]) -> int:
    """Room that tensors of these shapes and dtypes take side by side, bytes."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in kinds)


def tensors_in(room: torch.Tensor, kinds: Iterable[Kind]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes, side by side in `room`, uint8 of at least their bytes."""
    found, start = [], 0
    for shape, dtype in kinds:
        size = math.prod(shape) * dtype.itemsize
        found.append(room[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class PinnedBytes:
    """Room in page-locked DRAM that grows as it must."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def like(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Room for tensors of these shapes and dtypes, in the place of what was there."""
        return self.of([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])

    def of(self, kinds: list[Kind]) -> list[torch.Tensor]:
        """As `like`, for shapes and dtypes."""
        room = bytes_of(kinds)
        if self._bytes is None or len(self._bytes) < room:
            self._bytes = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        return tensors_in(self._bytes, kinds)
