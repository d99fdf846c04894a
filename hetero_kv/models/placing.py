"""Places a model's weights: on the computing device, or in DRAM, from where layers are streamed one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_kv.models.errors import ModelError

AUTO, GPU, DRAM = "auto", "gpu", "dram"
# Share of a GPU's free memory up to which `auto` places weights there: a context needs the rest.
_MOST_OF_GPU = 0.9


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """The model's list of decoder layers; None if no list has as many modules as the configuration has layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(lists, None)


def weight_bytes(tensors: Any, dtype: torch.dtype | None = None) -> int:
    """Bytes of distinct tensors; floating-point ones count as `dtype`, unless it is None."""
    sizes = {
        id(tensor): tensor.numel() * (dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors
    }
    return sum(sizes.values())


def offloads_to_dram(weights_device: str, weights: int, free: int | None) -> bool:
    """Whether the layers' weights of a model on a GPU are in DRAM.

    Args:
        weights_device: the setting, `auto`, `gpu` or `dram`.
        weights: bytes of all weights.
        free: free memory of the GPU, bytes; None if unknown.
    """
    if weights_device == AUTO:
        return free is not None and weights > _MOST_OF_GPU * free
    return weights_device == DRAM


def placed(model: Any, device: torch.device, weights_device: str) -> Any:
    """The loaded model, with its weights moved to their devices.

    Args:
        device: the computing device.
        weights_device: see `offloads_to_dram`.

    Raises ModelError if its layers' weights belong in DRAM, and it has no list of layers.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if offloads_to_dram(weights_device, weight_bytes((*model.parameters(), *model.buffers())), free):
            return with_layers_in_dram(model, device)
    return model.to(device)


def with_layers_in_dram(model: Any, device: torch.device) -> Any:
    """The model with all weights except its layers' on `device`. Raises ModelError if it has no list of layers."""
    layers = decoder_layers(model)
    if layers is None:
        raise ModelError(
            f"{type(model).__name__} has no list of its layers, so its weights cannot be in DRAM; set weights_device "
            "to gpu, or device to cpu"
        )
    inside = {id(module) for module in layers.modules()}
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if id(module) in inside:
            continue
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    data = tensor.data.to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(data, requires_grad=False) if is_parameter else data
                owner[name] = moved[id(tensor)]
    return model
