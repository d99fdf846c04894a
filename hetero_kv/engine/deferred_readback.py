"""Deferred readback: GPU numbers that the host reads once per forward, after all layers, before tokens are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hetero_kv.gpu_ops.host_copies import on_host


class CheckedNumber(NamedTuple):
    """A number for the host to check.

    Attributes:
        number: float32 without dimensions, on any device.
        check: callback for the number; it raises an error to refuse the tokens.
    """

    number: torch.Tensor
    check: Callable[[float], None]


class HostCopy(NamedTuple):
    """A tensor to be copied to DRAM.

    Attributes:
        tensor: on any device; nothing writes to it in this forward.
        receive: callback for the CPU copy, called unless a checked number is refused.
        before: called before the copy is queued, such as to have its stream wait for others; None for nothing.
    """

    tensor: torch.Tensor
    receive: Callable[[torch.Tensor], None]
    before: Callable[[], None] | None = None


def read_back(checked_numbers: Sequence[CheckedNumber], host_copies: Sequence[HostCopy] = ()) -> None:
    """Read all numbers back, then deliver all copies, with one synchronization per device.

    Raises the error of the first callback that refuses its number.
    """
    for coming in host_copies:
        if coming.before is not None:
            coming.before()
    devices = [each.number.device for each in checked_numbers] + [each.tensor.device for each in host_copies]
    for device in dict.fromkeys(devices):
        numbers = [each for each in checked_numbers if each.number.device == device]
        tensors = [each for each in host_copies if each.tensor.device == device]
        stacked = [torch.stack([each.number for each in numbers])] if numbers else []
        copies = on_host(*stacked, *(each.tensor for each in tensors))
        if numbers:
            for each, number in zip(numbers, copies[0].tolist(), strict=True):
                each.check(number)
        for coming, copy in zip(tensors, copies[len(stacked) :], strict=True):
            coming.receive(copy)
