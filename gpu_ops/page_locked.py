"""Page-locked DRAM of any size, between which and a GPU copies run beside other work."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gpu_ops.mapped_memory import MappedMemory

#: Up to here torch's own allocator is asked, which rounds sizes up to powers of two and keeps what it has made.
_LARGEST_OF_TORCH = 32 << 20


class PageLocked:
    """A tensor in page-locked DRAM, locked for as long as this object lives.

    Where CUDA refuses to lock so much, the tensor is pageable, with a warning: copies are slower then, and block.

    Args:
        shape, dtype: of the tensor.
        device: the GPU that copies to it and from it.

    Attributes:
        tensor: contiguous, not initialised.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        if size <= _LARGEST_OF_TORCH:
            self.tensor = torch.empty(*shape, dtype=dtype, pin_memory=True)
            return
        self.tensor = torch.empty(*shape, dtype=dtype)
        self._mapping = MappedMemory(self.tensor, device)
        self._mapping.reach(size)

    @classmethod
    def copy_of(cls, tensor: torch.Tensor, device: torch.device) -> PageLocked:
        """A tensor of the CPU, copied."""
        made = cls(tensor.shape, tensor.dtype, device)
        made.tensor.copy_(tensor)
        return made
