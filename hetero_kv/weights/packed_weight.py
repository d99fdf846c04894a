"""The interface of a weight matrix that stays quantized in memory, on any device."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch
from torch import nn

from hetero_kv.cpu_ops.weight_formats import FORMATS

FEW_ROWS = 32
"""Rows of activations up to which every device multiplies with codes; more rows unpack the weights, piece by piece.

CPUs use codes for more rows: `quantized_weight.most_rows_of_codes`."""


class PackedWeight(ABC):
    """A matrix [rows, columns] of quantized weights, or of 16-bit numbers, in tiles (`cpu_ops.weight_formats`).

    Attributes:
        data: the packed bytes, a uint8 tensor.
        name: GGML's name of the format.
        shape: [rows, columns].
        elsewhere: a weak reference to the same matrix on the device to which it was last moved.
    """

    def __init__(self, data: torch.Tensor, name: str, rows: int, columns: int) -> None:
        self.data, self.name, self.shape = data, name, torch.Size((rows, columns))
        self._unpacked_for: weakref.ref[nn.Parameter] | None = None
        self.elsewhere: weakref.ref[PackedWeight] | None = None

    @property
    def has_codes(self) -> bool:
        """Whether the weights are quantized codes; 16-bit numbers are multiplied with unquantized activations."""
        return not FORMATS[self.name].number

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, columns] @ weight.T + bias, in x's dtype."""

    @abstractmethod
    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [n] as numbers [n, columns]."""

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix as numbers [rows, columns]."""

    @abstractmethod
    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Compile the kernels of `multiply` and `rows` for `dtype`."""

    def parameter(self, dtype: torch.dtype) -> nn.Parameter:
        """The matrix as a parameter; tied modules share it while one of them references it."""
        made = None if self._unpacked_for is None else self._unpacked_for()
        if made is None or made.dtype is not dtype:
            made = nn.Parameter(self.unpacked(dtype), requires_grad=False)
            self._unpacked_for = weakref.ref(made)
        return made
