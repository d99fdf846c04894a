"""Precision of tile products on a GPU."""

from __future__ import annotations

import torch


def precision_of(tensor: torch.Tensor) -> str:
    """The `input_precision` of a product of such numbers at which float32 loses at most its last bits.

    From Ampere on, tensor cores multiply float32 as three TF32 products. Half precision is multiplied exactly.
    """
    return precision_of_singles(tensor) if tensor.dtype is torch.float32 else "ieee"


def precision_of_singles(tensor: torch.Tensor) -> str:
    """`precision_of` float32 numbers on the device of `tensor`."""
    return "tf32x3" if _is_ampere(tensor) else "ieee"


def multiplies_halves(tensor: torch.Tensor) -> bool:
    """Whether these are half-precision numbers that Triton multiplies on tensor cores, as it does from Ampere on."""
    return tensor.element_size() == 2 and _is_ampere(tensor)


def _is_ampere(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
