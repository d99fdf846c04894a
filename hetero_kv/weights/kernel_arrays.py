"""Tensors as kernel arguments: numpy arrays of the same memory, float32 or the bits of bfloat16."""

from __future__ import annotations

import numpy as np
import torch

#: Tensor dtype -> dtype of the array of the same memory.
ARRAY_DTYPES: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.bfloat16: np.uint16}
#: An array's dtype -> dtype of the tensor of the same memory.
DTYPES = {np.dtype(kind): dtype for dtype, kind in ARRAY_DTYPES.items()}
#: An array's dtype -> its name, cached because NumPy builds it at every access.
NAMES = {np.dtype(kind): np.dtype(kind).name for kind in ARRAY_DTYPES.values()}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a CPU tensor as an array with its strides: float32, or the bits of bfloat16."""
    return tensor.numpy() if tensor.dtype is torch.float32 else tensor.view(torch.uint16).numpy()


def kernel_array(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """`bits` of any tensor, converted to `dtype`, the CPU and contiguous memory where necessary."""
    if tensor.dtype is not dtype or tensor.device.type != "cpu":
        tensor = tensor.to("cpu", dtype)
    return bits(tensor.contiguous())
