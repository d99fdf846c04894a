"""The weight matrices of a mixture's experts, packed one by one: a token reads those of its own experts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from cpu_ops.quantised_linear import PackedMatrix, multiply_runs
from gpu_ops.kernel_choice import runs_triton
from gpu_ops.packed_weights import multiply_chosen
from hetero_kv.weights.moving import packed_weight
from hetero_kv.weights.packed_weight import FEW_ROWS, PackedWeight
from hetero_kv.weights.quantised_weight import QuantisedWeight, kernel_threads_of_torch


class ExpertWeights:
    """Matrices [rows, columns] of one type, one for each expert.

    Attributes:
        data: the packed bytes of all of them, a uint8 tensor [experts, bytes of one].
        name: GGML's name of the type.
        shape: [rows, columns].
        experts: the matrices, views of it.
    """

    def __init__(self, data: torch.Tensor, name: str, rows: int, columns: int) -> None:
        self.data, self.name, self.shape = data, name, torch.Size((rows, columns))
        self.experts: list[PackedWeight] = [packed_weight(each, name, rows, columns) for each in data]

    @cached_property
    def matrices(self) -> list[PackedMatrix]:
        """What the CPU's kernels take, of weights that lie in DRAM."""
        return [each.matrix for each in self.experts if isinstance(each, QuantisedWeight)]

    def at(self, data: torch.Tensor) -> ExpertWeights:
        """The matrices, their bytes lying in `data` by now."""
        return self if data is self.data else ExpertWeights(data, self.name, *self.shape)

    @classmethod
    def _packed(cls, count: int, packed: Callable[[int], QuantisedWeight]) -> ExpertWeights:
        """Pack `count` matrices, one after the other, each by `packed` of its number."""
        first = packed(0)
        data = torch.empty((count, len(first.data)), dtype=torch.uint8)
        for number in range(count):
            data[number] = (packed(number) if number else first).data
        return cls(data, first.name, *first.shape)

    @classmethod
    def of_blocks(cls, blocks: np.ndarray, name: str, columns: int) -> ExpertWeights:
        """Pack GGML's blocks [experts, rows, bytes of a row] uint8 of type `name`."""
        return cls._packed(len(blocks), lambda number: QuantisedWeight.of_blocks(blocks[number], name, columns))

    @classmethod
    def of_numbers(cls, weights: torch.Tensor, name: str) -> ExpertWeights:
        """Quantise weights [experts, rows, columns] to GGML's type `name`; raises as `QuantisedWeight.of_numbers`.

        The packed bytes lie where the weights do.
        """
        packed = cls._packed(len(weights), lambda number: QuantisedWeight.of_numbers(weights[number], name))
        return packed.at(packed.data.to(weights.device))


def chooses_on_device(x: torch.Tensor, rows: int) -> bool:
    """Whether products of `rows` rows with experts of their own are made where x is, the host not knowing which."""
    return rows <= FEW_ROWS and runs_triton(x)


def multiply_experts_of_rows(
    x: torch.Tensor, parts: Sequence[ExpertWeights], chosen: torch.Tensor
) -> list[torch.Tensor]:
    """x @ weight.T, each row with the weights of the expert `chosen` [rows] int64; see `chooses_on_device`.

    Returns [rows, part's rows] for each part, in x's dtype.
    """
    return [multiply_chosen(x, part.data, part.name, part.shape[0], chosen) for part in parts]


def multiply_experts(
    x: torch.Tensor, parts: Sequence[ExpertWeights], runs: Sequence[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """x @ weight.T, each row with the weights of its expert.

    Args:
        x: [rows, columns].
        parts: matrices that share x, of as many experts each.
        runs: (first row, end row, expert), which cover x in order.

    Returns [rows, part's rows] for each part, in x's dtype: the results of few rows come from what is packed, on a CPU
    with activations quantised. Where a run has more, each is multiplied by itself, as a matrix with so many rows is.
    """
    if x.device.type == "cpu" and max(end - first for first, end, _ in runs) <= FEW_ROWS:
        known = [part.matrices for part in parts]
        matrices = [(first, end, [each[expert] for each in known]) for first, end, expert in runs]
        numbers = x.detach().float().contiguous().numpy()
        results = multiply_runs(numbers, matrices, kernel_threads_of_torch())
        return [torch.from_numpy(result).to(x.dtype) for result in results]
    return [torch.cat([part.experts[expert].multiply(x[first:end]) for first, end, expert in runs]) for part in parts]
