"""The weight matrices of a mixture of experts, packed one by one, so that a token reads only its experts' weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from hetero_kv.cpu_ops.quantized_linear import PackedMatrix, multiply_runs
from hetero_kv.gpu_ops.packed_weights import has_kernels, multiply_chosen
from hetero_kv.weights.moving import packed_weight
from hetero_kv.weights.packed_weight import FEW_ROWS, PackedWeight
from hetero_kv.weights.quantized_weight import QuantizedWeight, kernel_threads_of_torch


class ExpertWeights:
    """Matrices [rows, columns] of one type, one for each expert.

    Attributes:
        data: the packed bytes of all matrices, a uint8 tensor [experts, bytes of one].
        name: GGML's name of the type.
        shape: [rows, columns].
        experts: the matrices, views of `data`.
    """

    def __init__(self, data: torch.Tensor, name: str, rows: int, columns: int) -> None:
        self.data, self.name, self.shape = data, name, torch.Size((rows, columns))
        self.experts: list[PackedWeight] = [packed_weight(each, name, rows, columns) for each in data]

    @cached_property
    def matrices(self) -> list[PackedMatrix]:
        """The matrices for the CPU's kernels, if the weights are in DRAM."""
        return [each.matrix for each in self.experts if isinstance(each, QuantizedWeight)]

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """x [n, columns] @ weight.T of one expert, in x's dtype."""
        return self.experts[expert].multiply(x)

    def at(self, data: torch.Tensor) -> ExpertWeights:
        """The same matrices with their bytes in `data`."""
        return self if data is self.data else ExpertWeights(data, self.name, *self.shape)

    @classmethod
    def _packed(cls, count: int, packed: Callable[[int], QuantizedWeight]) -> ExpertWeights:
        """Pack `count` matrices one after the other; `packed(number)` packs one."""
        first = packed(0)
        data = torch.empty((count, len(first.data)), dtype=torch.uint8)
        for number in range(count):
            data[number] = (packed(number) if number else first).data
        return cls(data, first.name, *first.shape)

    @classmethod
    def of_blocks(cls, blocks: np.ndarray, name: str, columns: int) -> ExpertWeights:
        """Pack GGML's blocks [experts, rows, bytes of a row] uint8 of type `name`."""
        return cls._packed(len(blocks), lambda number: QuantizedWeight.of_blocks(blocks[number], name, columns))

    @classmethod
    def of_numbers(cls, weights: torch.Tensor, name: str) -> ExpertWeights:
        """Quantize weights [experts, rows, columns] to GGML's type `name`; raises as `QuantizedWeight.of_numbers`.

        The packed bytes are on the weights' device.
        """
        packed = cls._packed(len(weights), lambda number: QuantizedWeight.of_numbers(weights[number], name))
        return packed.at(packed.data.to(weights.device))


class ExpertNumbers:
    """Unpacked matrices [rows, columns], one for each expert, which torch multiplies in their own dtype.

    Args:
        numbers: [experts, rows, columns], with any strides.
    """

    #: As of `ExpertWeights`: unpacked matrices have no kernels.
    matrices: ClassVar[list[PackedMatrix]] = []

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.shape = numbers, numbers.shape[1:]

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """x [n, columns] @ weight.T of one expert, in x's dtype."""
        weight = self.numbers[expert]
        return functional.linear(x.to(weight.dtype), weight).to(x.dtype)


def chooses_on_device(x: torch.Tensor, rows: int, parts: Iterable[ExpertWeights]) -> bool:
    """Whether `rows` rows are multiplied on x's device, where the kernel reads each row's expert without the host."""
    return rows <= FEW_ROWS and all(has_kernels(x, part.name) for part in parts)


def multiply_experts_of_rows(
    x: torch.Tensor, parts: Sequence[ExpertWeights], chosen: torch.Tensor
) -> list[torch.Tensor]:
    """x @ weight.T, each row with the weights of the expert `chosen` [rows] int64; see `chooses_on_device`.

    Returns [rows, part's rows] for each part, in x's dtype.
    """
    return [multiply_chosen(x, part.data, part.name, part.shape[0], chosen) for part in parts]


def multiply_experts(
    x: torch.Tensor, parts: Sequence[ExpertWeights | ExpertNumbers], runs: Sequence[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """x @ weight.T, each row with the weights of its expert.

    Args:
        x: [rows, columns].
        parts: matrices that share x, each with the same number of experts.
        runs: (first row, end row, expert), which cover x in order.

    Returns [rows, part's rows] for each part, in x's dtype. On a CPU, if every run is short, one call multiplies packed
    weights with quantized activations. Otherwise each run is a separate product.
    """
    known = [part.matrices for part in parts]
    if x.device.type == "cpu" and all(known) and max(end - first for first, end, _ in runs) <= FEW_ROWS:
        matrices = [(first, end, [each[expert] for each in known]) for first, end, expert in runs]
        numbers = x.detach().float().contiguous().numpy()
        results = multiply_runs(numbers, matrices, kernel_threads_of_torch())
        return [torch.from_numpy(result).to(x.dtype) for result in results]
    return [torch.cat([part.multiply(x[first:end], expert) for first, end, expert in runs]) for part in parts]
