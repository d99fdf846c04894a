"""Random tensors and error measures for comparisons under Triton's interpreter."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def _each(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """As many combinations as the longest axis has values, in which every value of every axis comes up."""
    for number in range(max(map(len, axes))):
        yield tuple(axis[number % len(axis)] for axis in axes)


def multiplied(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """All combinations; where there is no argument as few as have every value."""
    return itertools.product(*axes) if sys.argv[1:] else _each(*axes)


def combined(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Combinations in which every two values of two axes meet; all of them where the argument is `all`.

    As few as have every value where there is no argument. The third axis is the shortest.
    """
    if sys.argv[1:] != ["pairs"]:
        yield from multiplied(first, second, third)
        return
    for (one, a), (other, b) in itertools.product(enumerate(first), enumerate(second)):
        yield a, b, third[(one + other) % len(third)]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest number, in units of the dtype's precision; the shapes agree."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    # The interpreter cuts numbers off to bfloat16, a GPU rounds them.
    apart = (actual.double() - expected.double()).masked_fill(actual == expected, 0.0).abs().max()
    largest = expected.double().masked_fill(expected.isinf(), 0.0).abs().max()
    return float(apart / largest / torch.finfo(actual.dtype).eps) if apart else 0.0
