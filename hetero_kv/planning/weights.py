"""What a model's weights take: as they are loaded, packed ones as they are packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gpu_ops.layer_stream import LayerStream
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.streamed_weights import walked_layers
from hetero_kv.weights.device_weight import room_bytes


def weight_sizes(module: nn.Module, dtype: torch.dtype | None, stored: Mapping[str, str]) -> dict[int, int]:
    """Bytes of parameters and buffers by their id, those that operators keep quantised as they keep them.

    Args:
        dtype: of the others; None for their own.
        stored: parameter -> the quantised type that its file holds.
    """
    sizes: dict[int, int] = {}
    for part in module.modules():
        if isinstance(part, QuantizedModule):
            for parameter, size in part.weight_sizes(stored, dtype).items():
                sizes.setdefault(parameter, size)
    for tensor in (*module.parameters(), *module.buffers()):
        element = dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()
        sizes.setdefault(id(tensor), tensor.numel() * element)
    return sizes


def parted(model: nn.Module, weights: int, dtype: torch.dtype | None, stored: Mapping[str, str]) -> tuple[int, int]:
    """Of a model with so many bytes of weights whose layers' lie in DRAM: what a GPU holds, and what DRAM does."""
    layers = [layer for module in model.modules() for layer in walked_layers(module)]
    sizes = [sum(weight_sizes(layer, dtype, stored).values()) for layer in layers]
    return (weights - sum(sizes) + LayerStream.device_bytes(sizes), sum(sizes)) if sizes else (weights, 0)


def room_to_unpack(model: nn.Module, element: int, stored: Mapping[str, str]) -> int:
    """What the largest piece takes of the matrices that are packed, or will be."""
    packed = (module for module in model.modules() if isinstance(module, QuantizedModule))
    shapes = (shape for module in packed for shape in module.packed_shapes(stored))
    return max((room_bytes(rows, columns, element) for rows, columns in shapes), default=0)
