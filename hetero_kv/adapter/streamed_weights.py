"""Decoder layers with weights in DRAM, in a model that computes on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.quantized_experts import parameters_beside_experts
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.gpu_ops.layer_stream import LayerStream
from hetero_kv.models.placing import weight_bytes


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The chunked layers that a module walks through, in order; empty for any other module."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if isinstance(layer, ChunkedDecoderLayer)]


def is_in_dram(layer: nn.Module, device: torch.device) -> bool:
    """Whether a layer's weights are in DRAM while `device` computes; experts that the CPU computes do not count."""
    return device.type == "cuda" and any(each.device.type == "cpu" for each in parameters_beside_experts(layer))


def stream_weights(model: Any, device: torch.device) -> None:
    """Stream weights from DRAM to the compute device `device`, one layer ahead; set up once per model.

    Raises UnsupportedModelError when some of the layers are no ChunkedDecoderLayers.
    """
    layers = decoder_layers(model) if device.type == "cuda" else []
    if not layers or LayerStream.streams(layers[0]) or not any(is_in_dram(each, device) for each in layers):
        return
    others = [layer for each in model.children() if isinstance(each, nn.ModuleList) for layer in each]
    if len(others) != len(layers):
        raise UnsupportedModelError(
            f"{len(others) - len(layers)} layers of {type(model).__name__} are not ChunkedDecoderLayers, but its "
            "weights are in DRAM; add a rule for them, or set weights_device to gpu"
        )
    LayerStream(layers, device, _follow)


def _follow(layer: nn.Module) -> None:
    """Update packed weights to the device of their bytes."""
    for module in layer.modules():
        if isinstance(module, QuantizedModule):
            for _ in module.packed_weights():
                pass


def bytes_of_room(model: nn.Module, device: torch.device) -> int:
    """Bytes that the stream will take on `device`, if it is not set up yet; 0 for weights on the device."""
    layers = [layer for module in model.modules() for layer in decoder_layers(module)]
    if not layers or LayerStream.streams(layers[0]) or not is_in_dram(layers[0], device):
        return 0
    return LayerStream.device_bytes([weight_bytes((*layer.parameters(), *layer.buffers())) for layer in layers])
