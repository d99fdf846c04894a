"""Buffers of a decoded token between a layer's kernels: allocated once, overwritten by every layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from hetero_kv.weights.kernel_arrays import bits

_Shape = tuple[int, tuple[int, int, int], int, torch.dtype]


class DecodeBuffers:
    """Queries, keys, values and attended values of one token per row, float32 or the bits of bfloat16.

    Args:
        tensors: queries, keys, values and attended values, [rows, heads, 1, dim] each.

    Attributes:
        q, k, v, attended: the arrays of their memory.
        attended_rows: `attended` as [rows, heads * dim].
        new: the tensors of keys and values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.q, self.k, self.v, self.attended = map(bits, tensors)
        self.attended_rows = self.attended.reshape(len(self.attended), -1)
        self.new = tensors[1], tensors[2]
        self._parts: dict[tuple[int, int], DecodeBuffers] = {}

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors of queries, keys and values."""
        return self._tensors[0], *self.new

    def put(self, attended: torch.Tensor) -> None:
        """Write the attended values, a tensor."""
        self._tensors[3].copy_(attended)

    @classmethod
    def empty(cls, rows: int, heads: tuple[int, int, int], dim: int, dtype: torch.dtype) -> DecodeBuffers:
        """Buffers for `rows` tokens of a model of `dtype`; heads: numbers of heads of queries, keys and values."""
        return cls([torch.empty((rows, number, 1, dim), dtype=dtype) for number in (*heads, heads[0])])

    def of_rows(self, rows: slice) -> DecodeBuffers:
        """Some neighbouring rows of the same memory."""
        part = self._parts.get((rows.start, rows.stop))
        if part is None:
            part = DecodeBuffers([tensor[rows] for tensor in self._tensors])
            self._parts[rows.start, rows.stop] = part
        return part


class _OfThread(threading.local):
    """The buffers of one thread: threads decode independently of each other.

    Attributes:
        arrays: those of the latest shapes.
    """

    def __init__(self) -> None:
        self.shape: _Shape | None = None
        self.arrays: DecodeBuffers | None = None


OF_THREAD = _OfThread()


def decode_buffers(rows: int, heads: tuple[int, int, int], dim: int, dtype: torch.dtype) -> DecodeBuffers:
    """This thread's arrays of these shapes (`DecodeBuffers`); the next layer overwrites their contents."""
    shape = (rows, heads, dim, dtype)
    if OF_THREAD.arrays is None or OF_THREAD.shape != shape:
        OF_THREAD.shape, OF_THREAD.arrays = shape, DecodeBuffers.empty(rows, heads, dim, dtype)
    return OF_THREAD.arrays
