"""The packed matrices of a gated MLP: of its gate, of what the gate multiplies, and of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from hetero_kv.adapter.decoder_form import are_packed, has_own_numbers
from hetero_kv.adapter.llama_layer import GATES, MLP
from hetero_kv.cpu_ops.weight_formats import TILE

# LFM2's names, of an MLP whose activation is no module.
_NUMBERED = "w1", "w3", "w2"
# Granite's: the first matrix has the gates' rows, then as many others.
_JOINED = "input_linear", "output_linear"
_ACTIVATIONS = {"act_fn", "activation"}


@dataclass(frozen=True)
class GatedMLP:
    """A gated MLP of quantized matrices without biases.

    Attributes:
        formats: of the matrices.
        calls: [3, 5] int64, `PackedMatrix.call` of gate, up and down.
        activation: the gate's, a module that `GATES` has by its class's name.
        inner: the number of gates.
    """

    formats: tuple[str, ...]
    calls: np.ndarray
    activation: nn.Module
    inner: int

    @property
    def kind(self) -> int:
        """The gate's activation as `cpu_ops.gates` numbers it."""
        return GATES[type(self.activation).__name__]

    @classmethod
    def of(cls, mlp: Any) -> GatedMLP | None:
        """The matrices of a module; None for another form."""
        parts = dict(mlp.named_children())
        own = parts.keys() - _ACTIVATIONS
        names = next((each for each in (MLP, _NUMBERED, _JOINED) if set(each) == own), None)
        activations = [parts[name] for name in parts.keys() & _ACTIVATIONS] or [nn.SiLU()]
        if names is None or has_own_numbers(mlp) or type(activations[0]).__name__ not in GATES:
            return None
        matrices = [parts[name] for name in names]
        if not are_packed(matrices) or any(matrix.bias is not None for matrix in matrices):
            return None
        *inputs, down = matrices
        inner = sum(matrix.out_features for matrix in inputs) // 2
        if any(matrix.out_features != 2 * inner // len(inputs) for matrix in inputs) or down.in_features != inner:
            return None
        calls = [matrix.quantized.kernels for matrix in inputs]
        if len(inputs) == 1:
            if inner % TILE:
                return None
            whole = inputs[0].quantized.matrix
            first, tiles, *addresses = calls[0]
            half = whole.layout.packed_bytes(inner, whole.columns)
            calls = [(first, tiles // 2, *addresses), (first + half, tiles // 2, *addresses)]
        formats = tuple(matrix.quantized.name for matrix in matrices)
        return cls(formats, np.array([*calls, down.quantized.kernels], np.int64), activations[0], inner)
