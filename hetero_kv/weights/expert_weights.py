"""The weight matrices of a mixture's experts, packed one by one: a token reads those of its own experts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from cpu_ops.quantised_linear import PackedMatrix, multiply_runs
from hetero_kv.weights.quantised_weight import FEW_ROWS, QuantisedWeight, kernel_threads_of_torch


class ExpertWeights:
    """Matrices [rows, columns] of one type, one for each expert.

    Attributes:
        data: the packed bytes of all of them, a uint8 tensor [experts, bytes of one].
        experts: the matrices, views of it.
    """

    def __init__(self, count: int, packed: Callable[[int], QuantisedWeight]) -> None:
        """Pack `count` matrices, one after the other, each by `packed` of its number."""
        first = packed(0)
        self.data = torch.empty((count, len(first.data)), dtype=torch.uint8)
        self.experts: list[QuantisedWeight] = []
        for number in range(count):
            matrix = (packed(number) if number else first).matrix
            room = self.data[number].numpy()
            room[:] = matrix.data
            self.experts.append(QuantisedWeight(PackedMatrix(room, matrix.name, matrix.rows, matrix.columns)))

    @classmethod
    def of_blocks(cls, blocks: np.ndarray, name: str, columns: int) -> ExpertWeights:
        """Pack GGML's blocks [experts, rows, bytes of a row] uint8 of type `name`."""
        return cls(len(blocks), lambda number: QuantisedWeight.of_blocks(blocks[number], name, columns))

    @classmethod
    def of_numbers(cls, weights: torch.Tensor, name: str) -> ExpertWeights:
        """Quantise weights [experts, rows, columns] to GGML's type `name`; raises as `QuantisedWeight.of_numbers`."""
        return cls(len(weights), lambda number: QuantisedWeight.of_numbers(weights[number], name))

    @property
    def name(self) -> str:
        """GGML's name of the type."""
        return self.experts[0].name


def multiply_experts(
    x: torch.Tensor, parts: Sequence[ExpertWeights], runs: Sequence[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """x @ weight.T, each row with the weights of its expert.

    Args:
        x: [rows, columns].
        parts: matrices that share x, of as many experts each.
        runs: (first row, end row, expert), which cover x in order.

    Returns [rows, part's rows] for each part, in x's dtype: the results of few rows come from codes, activations being
    quantised, and those of a run of more than 32 rows from weights that are unpacked piece by piece.
    """
    if max(end - first for first, end, _ in runs) <= FEW_ROWS:
        matrices = [(first, end, [part.experts[expert].matrix for part in parts]) for first, end, expert in runs]
        numbers = x.detach().float().contiguous().numpy()
        results = multiply_runs(numbers, matrices, kernel_threads_of_torch())
        return [torch.from_numpy(result).to(x.dtype) for result in results]
    return [torch.cat([part.experts[expert].multiply(x[first:end]) for first, end, expert in runs]) for part in parts]
