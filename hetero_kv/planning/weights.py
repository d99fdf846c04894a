"""The memory of a model's weights after loading; packed weights count in their packed size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.streamed_weights import decoder_layers
from hetero_kv.gpu_ops.layer_stream import LayerStream
from hetero_kv.weights.device_weight import room_bytes


def weight_sizes(module: nn.Module, dtype: torch.dtype | None, stored: Mapping[str, str]) -> dict[int, int]:
    """Parameter's or buffer's id -> bytes; weights that operators keep quantized count in their quantized size.

    Args:
        dtype: the dtype of unquantized floating-point tensors; None for their present one.
        stored: parameter -> the quantized type in its file.
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
    """(bytes on the GPU, bytes in DRAM) of a model with `weights` bytes whose layers' weights are in DRAM."""
    layers = [layer for module in model.modules() for layer in decoder_layers(module)]
    sizes = [sum(weight_sizes(layer, dtype, stored).values()) for layer in layers]
    return (weights - sum(sizes) + LayerStream.device_bytes(sizes), sum(sizes)) if sizes else (weights, 0)


def room_to_unpack(model: nn.Module, element: int, stored: Mapping[str, str]) -> int:
    """Bytes of the unpack buffer: the largest piece of any matrix that is packed, or will be."""
    packed = (module for module in model.modules() if isinstance(module, QuantizedModule))
    shapes = (shape for module in packed for shape in module.packed_shapes(stored))
    return max((room_bytes(rows, columns, element) for rows, columns in shapes), default=0)
