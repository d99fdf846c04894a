"""What layers are told of a device behind all layers: read once per forward, before its tokens are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gpu_ops.host_copies import on_host


class Watched(NamedTuple):
    """A number that a layer has left behind.

    Attributes:
        number: float32 without dimensions, on any device.
        told: is called with the number; raises an error for one that the tokens are refused for.
    """

    number: torch.Tensor
    told: Callable[[float], None]


class Arriving(NamedTuple):
    """What a layer has on its way to DRAM.

    Attributes:
        tensor: on any device, and not written to in this forward.
        arrived: is called with it on the CPU, where no number that is watched is refused.
    """

    tensor: torch.Tensor
    arrived: Callable[[torch.Tensor], None]


def tell_all(watched: Sequence[Watched], arriving: Sequence[Arriving] = ()) -> None:
    """Look at all numbers, and hand on what arrives, with one wait for each device.

    Raises what the first of them to complain raises.
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
