"""The memory of a model's weights after loading; packed weights count in their packed size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hetero_kv.adapter.experts_in_dram import room_for_pieces
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.streamed_weights import decoder_layers
from hetero_kv.gpu_ops.layer_stream import LayerStream
from hetero_kv.models.placing import weight_bytes
from hetero_kv.weights.device_weight import room_bytes
from hetero_kv.weights.experts_form import experts_in


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


def experts_sizes(model: nn.Module, dtype: torch.dtype | None, stored: Mapping[str, str]) -> list[int]:
    """Bytes of the weights of each module with a mixture's experts, loaded or not; see `weight_sizes`."""
    sizes = []
    for module in experts_in(model):
        tensors = (*module.parameters(), *module.buffers())
        is_loaded = not any(tensor.is_meta for tensor in tensors)
        sizes.append(weight_bytes(tensors) if is_loaded else sum(weight_sizes(module, dtype, stored).values()))
    return sizes


def room_for_experts(model: nn.Module, dtype: torch.dtype | None, stored: Mapping[str, str]) -> int:
    """The GPU's memory for experts on their way from DRAM, bytes: the largest of any layer."""
    pairs = zip(experts_in(model), experts_sizes(model, dtype, stored), strict=True)
    return max((room_for_pieces(module.num_experts, size) for module, size in pairs), default=0)


def experts_in_dram(model: nn.Module, device: torch.device) -> int:
    """Bytes of experts of a loaded model that are in DRAM, while `device` computes the rest."""
    experts = (tensor for module in experts_in(model) for tensor in (*module.parameters(), *module.buffers()))
    return weight_bytes(each for each in experts if each.device.type == "cpu") if device.type == "cuda" else 0
