"""Tensors as kernels take them: numpy arrays of the same memory, of float32 or of bfloat16's bits."""

from __future__ import annotations

import numpy as np
import torch

#: What an array holds of a tensor's numbers.
ARRAY_DTYPES: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.bfloat16: np.uint16}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The same memory, of a contiguous tensor on the CPU: float32, or the bits of bfloat16."""
    return tensor.numpy() if tensor.dtype is torch.float32 else tensor.view(torch.uint16).numpy()


def kernel_array(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """`bits` of any tensor, converted where it is elsewhere, of another dtype than `dtype`, or not contiguous."""
    if tensor.dtype is not dtype or tensor.device.type != "cpu":
        tensor = tensor.to("cpu", dtype)
    return bits(tensor.contiguous())
