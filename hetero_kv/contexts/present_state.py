"""A quick check, run for every prompt, that a model is unchanged since a cache's tokens were computed."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero_kv.adapter.foreign import PLAIN_TENSORS, foreign_part
from hetero_kv.contexts.active_state import ActivePart, active_parts, description_of
from hetero_kv.contexts.active_tensors import own_tensors
from hetero_kv.engine.errors import ContextError

# Compared bytes per tensor: a change of `tensor.data` leaves no other trace.
_LOOKED_AT = 64


class _TensorSample(NamedTuple):
    """A tensor's id, torch's version counter, and some of its bytes."""

    which: int
    version: int | None
    bytes: bytes

    def is_like(self, other: _TensorSample) -> bool:
        # Moved weights are new tensors with the same numbers.
        return self.bytes == other.bytes and (self.which != other.which or self.version == other.version)


class PresentState:
    """The active parts of a model, and a sample of its weights.

    It raises nothing: a hook of unknown computation is compared by object identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[Any] = []
        tensors: list[torch.Tensor] = []
        for part in active_parts(model):
            self._parts.append(type(part.module))
            if foreign_part(part.module) is not None:
                self._parts.append(_description_or_hooks(part))
            tensors += (tensor for _, tensor in own_tensors(part))
        self._tensors = [
            _TensorSample(id(tensor), None if tensor.is_inference() else tensor._version, _some_bytes(tensor))
            for tensor in tensors
        ]

    def is_like(self, other: PresentState) -> bool:
        """Whether no difference between the two is found."""
        return (
            self._parts == other._parts
            and len(self._tensors) == len(other._tensors)
            and all(mine.is_like(theirs) for mine, theirs in zip(self._tensors, other._tensors, strict=True))
        )


def _description_or_hooks(part: ActivePart) -> Any:
    try:
        return description_of(part)
    except ContextError as error:
        hooks = (*part.module._forward_hooks.values(), *part.module._forward_pre_hooks.values())
        return str(error), hooks, part.module.__dict__.get("forward")


def _some_bytes(tensor: torch.Tensor) -> bytes:
    """A sample of a CPU tensor's bytes at equal steps; b"" for others, which would need a device synchronisation."""
    if type(tensor) not in PLAIN_TENSORS or tensor.device.type != "cpu" or not tensor.numel():
        return b""
    dense = tensor.detach().contiguous()
    # An odd step comes upon signs and exponents too. Slices of torch's take five times as long.
    step = dense.nbytes // _LOOKED_AT | 1
    memory = (ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())
    return memoryview(memory)[: _LOOKED_AT * step : step].tobytes()
