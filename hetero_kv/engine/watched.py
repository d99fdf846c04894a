"""Reads of device numbers that are deferred to the end of a forward: one wait per device, before tokens are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gpu_ops.host_copies import on_host


class Watched(NamedTuple):
    """A device number that a layer needs on the host.

    Attributes:
        number: float32 scalar tensor, on any device.
        told: receives the number; raises an error if the forward's tokens must be refused.
    """

    number: torch.Tensor
    told: Callable[[float], None]


class Arriving(NamedTuple):
    """A tensor that a layer copies to DRAM.

    Attributes:
        tensor: on any device; nothing writes to it during this forward.
        arrived: receives the copy on the CPU, after every number has been accepted.
    """

    tensor: torch.Tensor
    arrived: Callable[[torch.Tensor], None]


def tell_all(watched: Sequence[Watched], arriving: Sequence[Arriving] = ()) -> None:
    """Pass all numbers and tensors to their layers, with one wait per device.

    Raises the first error that a layer raises.
    """
    devices = [each.number.device for each in watched] + [each.tensor.device for each in arriving]
    for device in dict.fromkeys(devices):
        numbers = [each for each in watched if each.number.device == device]
        tensors = [each for each in arriving if each.tensor.device == device]
        stacked = [torch.stack([each.number for each in numbers])] if numbers else []
        copies = on_host(*stacked, *(each.tensor for each in tensors))
        if numbers:
            for each, number in zip(numbers, copies[0].tolist(), strict=True):
                each.told(number)
        for coming, copy in zip(tensors, copies[len(stacked) :], strict=True):
            coming.arrived(copy)
