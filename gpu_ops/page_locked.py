"""Page-locked DRAM of any size, whose copies from and to a GPU overlap other work."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hetero_kv.gpu_ops.mapped_memory import MappedMemory

#: Up to this size torch's allocator is used, which rounds sizes up to powers of two and caches memory.
_LARGEST_OF_TORCH = 32 << 20


class PageLocked:
    """A tensor in page-locked DRAM, locked as long as this object lives.

    If CUDA refuses to lock that much, the tensor is pageable, with a warning: copies are then slower, and block.

    Args:
        shape, dtype: shape and dtype of the tensor.
        device: the GPU that copies to it and from it.

    Attributes:
        tensor: contiguous, uninitialised.
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
        """Returns a page-locked copy of a CPU tensor."""
        made = cls(tensor.shape, tensor.dtype, device)
        made.tensor.copy_(tensor)
        return made
