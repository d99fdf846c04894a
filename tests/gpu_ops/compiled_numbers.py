"""Tensors of the launches that are compiled, and their types."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.row_memory import RowMemory

DIM, HALF, BRAIN, SINGLE = 128, torch.float16, torch.bfloat16, torch.float32


def at_addresses(tensor: torch.Tensor) -> RowMemory:
    """Rows as those of a tensor [batch, ...], which lie anywhere."""
    return RowMemory.like(tensor, torch.zeros(len(tensor), dtype=torch.int64))


def zeros(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)
