"""Numbers on a device that layers are told behind all layers: read once per forward, before its tokens are stored."""

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


def tell_all(watched: Sequence[Watched]) -> None:
    """Look at all of them, with one wait for each device. Raises what the first of them to complain raises."""
    for device in dict.fromkeys(each.number.device for each in watched):
        there = [each for each in watched if each.number.device == device]
        (numbers,) = on_host(torch.stack([each.number for each in there]))
        for each, number in zip(there, numbers.tolist(), strict=True):
            each.told(number)
