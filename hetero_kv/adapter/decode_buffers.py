"""Buffers of a decoded token between a layer's native calls: allocated once, overwritten by every layer."""

from __future__ import annotations

import threading

import numpy as np
import torch

from hetero_kv.adapter.kernel_arrays import bits

_Shape = tuple[int, tuple[int, int, int], int, torch.dtype]


class DecodeBuffers:
    """Queries, keys, values and attended values of one token per row, float32 or the bits of bfloat16.

    Args:
        rows: number of tokens.
        heads: number of heads of queries, keys and values.
        dim: of each head.
        dtype: of the model.

    Attributes:
        q, k, v: [rows, heads, 1, dim] each.
        attended: [rows, heads, 1, dim], as q.
        attended_rows: the same memory, [rows, heads * dim].
    """

    def __init__(self, rows: int, heads: tuple[int, int, int], dim: int, dtype: torch.dtype) -> None:
        shapes = [(rows, number, 1, dim) for number in (*heads, heads[0])]
        self.q, self.k, self.v, self.attended = (bits(torch.empty(shape, dtype=dtype)) for shape in shapes)
        self.attended_rows = self.attended.reshape(rows, -1)


class _OfThread(threading.local):
    """Buffers of one thread: threads decode independently of each other.

    Attributes:
        arrays: those of the latest shapes.
        hidden: the latest output of a layer and the array of the same memory: the next layer's input.
    """

    def __init__(self) -> None:
        self.shape: _Shape | None = None
        self.arrays: DecodeBuffers | None = None
        self.hidden: tuple[torch.Tensor | None, np.ndarray | None] = (None, None)


OF_THREAD = _OfThread()


def decode_buffers(rows: int, heads: tuple[int, int, int], dim: int, dtype: torch.dtype) -> DecodeBuffers:
    """This thread's arrays of these shapes (`DecodeBuffers`); the next layer overwrites their contents."""
    shape = (rows, heads, dim, dtype)
    if OF_THREAD.arrays is None or OF_THREAD.shape != shape:
        OF_THREAD.shape, OF_THREAD.arrays = shape, DecodeBuffers(rows, heads, dim, dtype)
    return OF_THREAD.arrays


def hidden_array(hidden_states: torch.Tensor) -> np.ndarray:
    """Hidden states as an array [rows, all else], of the same memory if that is contiguous."""
    tensor, array = OF_THREAD.hidden
    if tensor is hidden_states and array is not None:
        return array
    return bits(hidden_states.detach().reshape(len(hidden_states), -1).contiguous())


def new_hidden(like: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor for a layer's output, and the array of the same memory, which the next layer gets by `hidden_array`."""
    tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
    array = bits(tensor.view(len(tensor), -1))
    OF_THREAD.hidden = tensor, array
    return tensor, array
