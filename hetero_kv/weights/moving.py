"""Packed matrices that go from one device to another, once for all modules that are tied."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from hetero_kv.weights.device_weight import DeviceWeight
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.quantised_weight import QuantisedWeight


def packed_weight(data: torch.Tensor, name: str, rows: int, columns: int) -> PackedWeight:
    """A packed matrix for what computes where its bytes `data` lie."""
    kind = QuantisedWeight.of_bytes if data.device.type == "cpu" else DeviceWeight
    return kind(data, name, rows, columns)


def weight_at(weight: PackedWeight, data: torch.Tensor) -> PackedWeight:
    """The matrix, its bytes lying in `data` by now; the same object for all modules that are tied."""
    if data is weight.data:
        return weight
    there = weight.elsewhere() if weight.elsewhere is not None else None
    if there is None or there.data is not data:
        there = packed_weight(data, weight.name, *weight.shape)
        weight.elsewhere = weakref.ref(there)
    return there


def weight_moved(weight: PackedWeight, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
    """The matrix where `move` takes its bytes; of modules that are tied the first one takes them there."""
    there = weight.elsewhere() if weight.elsewhere is not None else None
    if there is not None and move(there.data) is there.data:
        return there
    return weight_at(weight, move(weight.data))
