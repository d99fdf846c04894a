"""A mixture's experts for few rows: one native call for all chosen experts of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.decoder_form import has_own_numbers
from hetero_kv.adapter.llama_layer import GATES
from hetero_kv.adapter.packed_mlp import ACTIVATIONS
from hetero_kv.cpu_ops.expert_products import expert_regions, experts_output
from hetero_kv.cpu_ops.gates import CLAMPED_SWIGLU, SILU
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE
from hetero_kv.weights.expert_weights import ExpertWeights
from hetero_kv.weights.experts_form import ExpertsForm
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, NAMES, bits
from hetero_kv.weights.quantized_weight import kernel_threads_of_torch

#: Attributes of experts with their own kind of gate (gpt-oss's): its sharpness and its limit.
_CLAMPED = "alpha", "limit"
_Parts = Sequence[tuple[slice, ExpertWeights]]


@dataclass(frozen=True)
class ExpertProducts:
    """The arguments of `cpu_ops.expert_products` that stay the same from token to token.

    Attributes:
        experts: their number.
        matrices: [3, 5] int64, of the gate, up and down projections; without gates the up projection is twice in it.
        biases: of the three projections, [experts, outputs], views of the module's memory; empty for none.
        dtype: numpy's name of the dtype of the biases.
        regions: from `cpu_ops.expert_products.expert_regions`, for the experts' activation.
        sharpness, limit: of `gates.CLAMPED_SWIGLU`.
    """

    experts: int
    matrices: np.ndarray
    biases: tuple[np.ndarray, np.ndarray, np.ndarray]
    dtype: str
    regions: np.ndarray
    sharpness: np.float32
    limit: np.float32

    @classmethod
    def of(cls, module: Any, form: ExpertsForm, gate_up: _Parts, down: _Parts) -> ExpertProducts | None:
        """The arguments for a module of experts with packed weights; None for another form.

        The activation is the one that the module's attributes name; a trial must confirm it.
        """
        gate_up = sorted(gate_up, key=lambda part: part[0].start or 0)
        halves = _halves(gate_up, form)
        if halves is None or len(down) != 1 or (form.has_bias and not form.has_gate):
            return None
        (gate, _), (up, _), last = *halves, down[0][1]
        inner, columns = last.shape[1], gate.shape[1]
        weights = gate, up, last
        if not form.has_gate and (gate.shape[0] != inner or has_own_numbers(module)):
            return None
        if inner % GROUP or columns % GROUP or any(FORMATS[each.name].number for each in weights):
            return None
        if any(each.data.device.type != "cpu" for each in weights):
            return None
        biases = _biases(module, form, [outputs for outputs, _ in gate_up], inner)
        kind = _activation(module) if form.has_gate else ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
        if biases is None or kind is None:
            return None
        matrices = [_call(each, first) for each, first in (*halves, (last, 0))]
        for row in matrices[:2]:
            row[2] = inner // TILE
        sharpness, limit = (np.float32(getattr(module, name, 0.0)) for name in _CLAMPED)
        dtype = NAMES[biases[0].dtype]
        return cls(
            module.num_experts, np.array(matrices, np.int64), biases, dtype, expert_regions(kind, dtype), sharpness,
            limit,
        )  # fmt: skip

    def output(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sums of the chosen experts' outputs times their shares, float32.

        x: [rows, width]. chosen, shares: [rows, k]; ids beyond the number of experts are ignored.
        """
        out = torch.empty(x.shape, dtype=torch.float32)
        numbers, weights = (each.detach().float().contiguous().numpy() for each in (x, shares))
        self.write(out.numpy(), numbers, chosen.detach().long().contiguous().numpy(), weights)
        return out

    def write(self, out: np.ndarray, x: np.ndarray, chosen: np.ndarray, shares: np.ndarray) -> None:
        """As `output`, into `out`, with arrays of float32 and ids of int64."""
        with one_kernel_at_a_time:
            experts_output(self.dtype)(
                all_threads(), self.regions, x, chosen, shares, self.experts, self.matrices, *self.biases,
                self.sharpness, self.limit, out, rows_per_pass(), kernel_threads_of_torch(),
            )  # fmt: skip


def _halves(gate_up: _Parts, form: ExpertsForm) -> list[tuple[ExpertWeights, int]] | None:
    """The weights of the gate and of the up projection, and the first row of each within them."""
    if not form.has_gate:
        return [(weights, 0) for _, weights in gate_up] * 2 if len(gate_up) == 1 else None
    if len(gate_up) == 2:
        return [(weights, 0) for _, weights in gate_up]
    ((_, weights),) = gate_up
    width = weights.shape[0] // 2
    return [(weights, 0), (weights, width)] if form.is_concatenated and width % TILE == 0 else None


def _call(weights: ExpertWeights, first: int) -> list[int]:
    """A row of `ExpertProducts.matrices`, of the rows from `first` on."""
    address, tiles, one, several = weights.matrices[0].call[:4]
    ahead = FORMATS[weights.name].packed_bytes(first, weights.shape[1])
    return [address + ahead, weights.data.stride(0), tiles, one, several]


def _biases(
    module: Any, form: ExpertsForm, outputs: Sequence[slice], inner: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The biases of gate, up and down as views; None if they have no array's dtype."""
    if not form.has_bias:
        none = np.empty((0, 0), np.float32)
        return none, none, none
    both, down = module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()
    if (
        both.dtype is not down.dtype
        or both.dtype not in ARRAY_DTYPES
        or not (both.is_contiguous() and down.is_contiguous())
    ):
        return None
    halves = outputs if len(outputs) == 2 else (slice(0, inner), slice(inner, None))
    gate, up = (bits(both)[:, half] for half in halves)
    return gate, up, bits(down)


def _activation(module: Any) -> int | None:
    """The kind of a module's activation (`cpu_ops.gates`); None for an unknown one."""
    if all(isinstance(getattr(module, name, None), int | float) for name in _CLAMPED):
        return CLAMPED_SWIGLU
    # Other numbers may be limits that a trial does not reach.
    if has_own_numbers(module):
        return None
    act = getattr(module, "act_fn", None)
    return SILU if act is nn.functional.silu else GATES.get(type(act).__name__)
