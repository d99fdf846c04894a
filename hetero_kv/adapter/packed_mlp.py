"""The packed matrices of an MLP: of its gate if it has one, of what the gate multiplies, and of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from hetero_kv.adapter.decoder_form import are_packed, factor_of, has_own_numbers
from hetero_kv.adapter.llama_layer import GATES, MLP
from hetero_kv.cpu_ops.gates import SQUARED_RELU
from hetero_kv.cpu_ops.weight_formats import TILE

# LFM2's names, of an MLP whose activation is no module.
_NUMBERED = "w1", "w3", "w2"
# Granite's: the first matrix has the gates' rows, then as many others.
_JOINED = "input_linear", "output_linear"
# Nemotron-H's, without gates.
_UNGATED = "up_proj", "down_proj"
_ACTIVATIONS = {"act_fn", "activation"}
# Falcon-H1's factors of the gates and of the output.
_FACTORS = "gate_multiplier", "down_multiplier"
#: Activations of an MLP without gates.
ACTIVATIONS: dict[str, int] = {"ReLUSquaredActivation": SQUARED_RELU}


@dataclass(frozen=True)
class PackedMLP:
    """An MLP of quantized matrices without biases.

    Attributes:
        formats: of the matrices.
        calls: [3, 5] int64, `PackedMatrix.call` of gate, up and down; [2, 5] without gates, of up and down.
        activation: a module; its class's name is in `GATES`, or without gates in `ACTIVATIONS`.
        inner: the number of inputs of the last matrix.
        gate_factor, factor: of the gates before their activation, and of the output.
    """

    formats: tuple[str, ...]
    calls: np.ndarray
    activation: nn.Module
    inner: int
    gate_factor: float
    factor: float

    @property
    def has_gate(self) -> bool:
        """Whether it has gates."""
        return len(self.calls) > len(_UNGATED)

    @property
    def kind(self) -> int:
        """The activation as `cpu_ops.gates` numbers it."""
        return (GATES if self.has_gate else ACTIVATIONS)[type(self.activation).__name__]

    @classmethod
    def of(cls, mlp: Any) -> PackedMLP | None:
        """The matrices of a module; None for another form."""
        parts = dict(mlp.named_children())
        own = parts.keys() - _ACTIVATIONS
        names = next((each for each in (MLP, _NUMBERED, _JOINED, _UNGATED) if set(each) == own), None)
        activations = [parts[name] for name in parts.keys() & _ACTIVATIONS] or [nn.SiLU()]
        known = ACTIVATIONS if names is _UNGATED else GATES
        if names is None or has_own_numbers(mlp, _FACTORS) or type(activations[0]).__name__ not in known:
            return None
        matrices = [parts[name] for name in names]
        if not are_packed(matrices) or any(matrix.bias is not None for matrix in matrices):
            return None
        *inputs, down = matrices
        width = sum(matrix.out_features for matrix in inputs)
        inner = width if names is _UNGATED else width // 2
        if any(matrix.out_features * len(inputs) != width for matrix in inputs) or down.in_features != inner:
            return None
        calls = [matrix.quantized.kernels for matrix in inputs]
        if names is _JOINED:
            if inner % TILE:
                return None
            whole = inputs[0].quantized.matrix
            first, tiles, *addresses = calls[0]
            half = whole.layout.packed_bytes(inner, whole.columns)
            calls = [(first, tiles // 2, *addresses), (first + half, tiles // 2, *addresses)]
        formats = tuple(matrix.quantized.name for matrix in matrices)
        table = np.array([*calls, down.quantized.kernels], np.int64)
        return cls(formats, table, activations[0], inner, *(factor_of(mlp, name) for name in _FACTORS))
