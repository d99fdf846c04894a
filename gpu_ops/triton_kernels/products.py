"""How a GPU multiplies the tiles of two matrices."""

from __future__ import annotations

import torch


def precision_of(tensor: torch.Tensor) -> str:
    """`input_precision` of a product of numbers like these, by which float32 loses its last bits at most.

    Tensor cores multiply float32 as three products of TF32, from Ampere on. Half precision is multiplied exactly.
    """
    return "tf32x3" if tensor.dtype is torch.float32 and _is_ampere(tensor) else "ieee"


def multiplies_halves(tensor: torch.Tensor) -> bool:
    """Whether these are half-precision numbers, and tensor cores multiply them: Triton uses those from Ampere on."""
    return tensor.element_size() == 2 and _is_ampere(tensor)


def _is_ampere(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
