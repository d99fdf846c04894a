"""Buffers of a decoded token between a layer's native calls: allocated once, overwritten by every layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, bits

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


class QueuedTensor(torch.Tensor):
    """A layer's output that the kernels in a queue have yet to compute. Every use of it by torch runs them first.

    Attributes:
        queue: the kernels' queue.
        plain: the same memory as a plain tensor.
        array: the same memory as [rows, width].
    """

    queue: KernelQueue
    plain: torch.Tensor
    array: np.ndarray

    @classmethod
    def empty(cls, like: np.ndarray, queue: KernelQueue) -> QueuedTensor:
        """A tensor [rows, 1, width] for hidden states like [rows, width], float32 or the bits of bfloat16."""
        # Two calls of torch fewer than a tensor and its array.
        memory = np.empty((len(like), 1, like.shape[1]), like.dtype)
        plain = torch.from_numpy(memory)
        if like.dtype == ARRAY_DTYPES[torch.bfloat16]:
            plain = plain.view(torch.bfloat16)
        tensor = plain.as_subclass(cls)
        tensor.queue, tensor.plain, tensor.array = queue, plain, memory.reshape(like.shape)
        return tensor

    def computed(self) -> torch.Tensor:
        """The plain tensor, its numbers computed."""
        self.queue.run()
        return self.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(QueuedTensor, QueuedTensor.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


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


def hidden_array(hidden_states: torch.Tensor) -> np.ndarray:
    """Hidden states as an array [rows, all else], of the same memory if that is contiguous; not computed yet if they
    are queued."""
    if type(hidden_states) is QueuedTensor:
        return hidden_states.array
    return bits(hidden_states.detach().reshape(len(hidden_states), -1).contiguous())


def computed(output: Any) -> Any:
    """A layer's output or input, computed if it is queued."""
    return output.computed() if type(output) is QueuedTensor else output
