"""Moves packed matrices between devices, once for all tied modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from hetero_kv.weights.device_weight import DeviceWeight
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.quantized_weight import QuantizedWeight


def packed_weight(data: torch.Tensor, name: str, rows: int, columns: int) -> PackedWeight:
    """A packed matrix for the device of its bytes `data`."""
    kind = QuantizedWeight.of_bytes if data.device.type == "cpu" else DeviceWeight
    return kind(data, name, rows, columns)


def weight_at(weight: PackedWeight, data: torch.Tensor) -> PackedWeight:
    """The matrix with its bytes in `data`; tied modules get the same object."""
    if data is weight.data:
        return weight
    there = weight.elsewhere() if weight.elsewhere is not None else None
    if there is None or there.data is not data:
        there = packed_weight(data, weight.name, *weight.shape)
        weight.elsewhere = weakref.ref(there)
    return there


def weight_moved(weight: PackedWeight, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
    """The matrix on the device to which `move` takes its bytes; the first of several tied modules moves them."""
    there = weight.elsewhere() if weight.elsewhere is not None else None
    if there is not None and move(there.data) is there.data:
        return there
    return weight_at(weight, move(weight.data))
