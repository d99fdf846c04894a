"""Memory of a batch's rows that lies in several places, of which kernels find each by an address on the device.

A captured launch keeps the addresses of its arguments. With a table of addresses it serves rows that come and go: the
host writes the table anew, and nothing is captured again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final, overload

import torch


@final
@dataclass(frozen=True)
class RowMemory:
    """A batch of equal rows, each of which lies anywhere on the device; in a kernel's arguments as a tensor.

    Attributes:
        addresses: [batch] int64 on the device, contiguous: where each row begins; 0 for a row without memory, of which
            kernels read and write nothing.
        of_row: the shape of a row, and strides: its strides, in numbers.
        dtype: of the numbers.
    """

    addresses: torch.Tensor
    of_row: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor, addresses: torch.Tensor) -> RowMemory:
        """Rows as those of a tensor [batch, ...]."""
        return cls(addresses, tuple(tensor.shape[1:]), tensor.stride()[1:], tensor.dtype)

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor | None]) -> RowMemory:
        """These rows, which are alike; None for a row without memory. Waits for the device."""
        first = next(row for row in rows if row is not None)
        addresses = torch.tensor([0 if row is None else row.data_ptr() for row in rows], device=first.device)
        return cls.like(first[None], addresses)

    @property
    def shape(self) -> tuple[int, ...]:
        """[batch, ...]."""
        return len(self.addresses), *self.of_row

    @overload
    def stride(self) -> tuple[int, ...]: ...
    @overload
    def stride(self, dim: int) -> int: ...
    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """As of a tensor; 0 for the rows, whose distances are not equal."""
        strides = 0, *self.strides
        return strides if dim is None else strides[dim]

    @property
    def alignment(self) -> int:
        """Bytes of which the address of every row is a multiple: as many as of its size, up to 16."""
        last = max((size * stride for size, stride in zip(self.of_row, self.strides, strict=True)), default=1)
        return math.gcd(last * self.dtype.itemsize, 16)

    def first(self, rows: int) -> RowMemory:
        """The first rows."""
        return replace(self, addresses=self.addresses[:rows])

    def without(self, dim: int) -> RowMemory:
        """Without a dimension of one entry, which is not that of the rows."""
        of_row, strides = list(self.of_row), list(self.strides)
        del of_row[dim - 1], strides[dim - 1]
        return replace(self, of_row=tuple(of_row), strides=tuple(strides))

    def viewed(self, dtype: torch.dtype) -> RowMemory:
        """The same bytes as numbers of another size, along the last dimension, which is contiguous."""
        new, old = dtype.itemsize, self.dtype.itemsize
        of_row = *self.of_row[:-1], self.of_row[-1] * old // new
        strides = *(stride * old // new for stride in self.strides[:-1]), 1
        return replace(self, of_row=of_row, strides=strides, dtype=dtype)


#: [batch, ...] numbers, whose rows lie side by side or anywhere.
Memory = torch.Tensor | RowMemory
AnyMemory = TypeVar("AnyMemory", torch.Tensor, RowMemory)


def without(memory: Memory, dim: int) -> Memory:
    """Without a dimension of one entry, which is not that of the rows."""
    return memory.without(dim) if isinstance(memory, RowMemory) else memory.squeeze(dim)


def viewed(memory: Memory, dtype: torch.dtype) -> Memory:
    """The same bytes as numbers of another size, along the last dimension, which is contiguous."""
    return memory.viewed(dtype) if isinstance(memory, RowMemory) else memory.view(dtype)


def by_row(number: int | torch.Tensor, dims: int) -> int | torch.Tensor:
    """A number of each row, [batch] or [1], of as many dimensions; a number that all rows share as it is."""
    return number.view(-1, *[1] * (dims - 1)) if isinstance(number, torch.Tensor) else number


def addresses_of(tensor: torch.Tensor) -> list[int]:
    """Where the rows of a tensor [batch, ...] begin; 0 where they have no numbers."""
    step = tensor.stride(0) * tensor.element_size()
    return [tensor.data_ptr() + row * step for row in range(len(tensor))] if tensor.numel() else [0] * len(tensor)
