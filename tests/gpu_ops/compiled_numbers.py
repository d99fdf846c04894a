"""Tensors of the launches that are compiled, and their types."""

from __future__ import annotations

import torch

DIM, HALF, BRAIN, SINGLE = 128, torch.float16, torch.bfloat16, torch.float32


def zeros(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)
