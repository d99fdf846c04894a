"""A layer's output while the kernels that compute it wait in a queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, bits


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


def hidden_array(hidden_states: torch.Tensor) -> np.ndarray:
    """Hidden states as an array [rows, all else], of the same memory if that is contiguous; not computed yet if they
    are queued."""
    if type(hidden_states) is QueuedTensor:
        return hidden_states.array
    return bits(hidden_states.detach().reshape(len(hidden_states), -1).contiguous())


def computed(output: Any) -> Any:
    """A layer's output or input, computed if it is queued."""
    return output.computed() if type(output) is QueuedTensor else output


def number_of_tokens(hidden_states: torch.Tensor) -> int | None:
    """The number of rows if these are hidden states of one token each, in DRAM; else None."""
    if type(hidden_states) is QueuedTensor:
        return len(hidden_states.array)
    is_one = hidden_states.dim() == 3 and hidden_states.shape[1] == 1 and hidden_states.device.type == "cpu"
    return len(hidden_states) if is_one else None
