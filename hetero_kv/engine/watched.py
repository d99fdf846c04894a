"""Numbers on a device that a forward's tokens are refused for: read once per forward, behind all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gpu_ops.host_copies import on_host


class Watched(NamedTuple):
    """A number that a layer has left behind.

    Attributes:
        number: float32 without dimensions, on any device.
        require: raises an error for a number that must not be.
    """

    number: torch.Tensor
    require: Callable[[float], None]


def require_all(watched: Sequence[Watched]) -> None:
    """Look at all of them, with one wait for each device. Raises what the first of them to complain raises."""
    for device in dict.fromkeys(each.number.device for each in watched):
        there = [each for each in watched if each.number.device == device]
        (numbers,) = on_host(torch.stack([each.number for each in there]))
        for each, number in zip(there, numbers.tolist(), strict=True):
            each.require(number)
