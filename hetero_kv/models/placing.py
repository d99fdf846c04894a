"""Places a model's weights: on the computing device, or in DRAM.

Layers in DRAM are streamed one at a time; experts in DRAM are computed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hetero_kv.models.errors import ModelError
from hetero_kv.weights.experts_form import experts_in

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


def experts_offload_to_dram(
    experts_device: str, weights_device: str, weights: int, experts: int, free: int | None
) -> bool:
    """Whether the experts of a model on a GPU are in DRAM, where the CPU computes them; the other weights are not then.

    Args:
        experts_device: the setting, `auto`, `gpu` or `dram`.
        weights_device, weights, free: see `offloads_to_dram`.
        experts: bytes of the experts' weights; 0 without any.
    """
    if experts_device == AUTO:
        fits_without = free is not None and weights - experts <= _MOST_OF_GPU * free
        return weights_device == AUTO and fits_without and experts > 0 and offloads_to_dram(AUTO, weights, free)
    return experts_device == DRAM


def placed(model: Any, device: torch.device, weights_device: str, experts_device: str = GPU) -> Any:
    """The loaded model, with its weights moved to their devices.

    Args:
        device: the computing device.
        weights_device: see `offloads_to_dram`.
        experts_device: see `experts_offload_to_dram`.

    Raises ModelError if its layers' weights belong in DRAM, and it has no list of layers.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        weights = weight_bytes((*model.parameters(), *model.buffers()))
        mixtures = list(experts_in(model))
        experts = weight_bytes(each for module in mixtures for each in (*module.parameters(), *module.buffers()))
        if experts_offload_to_dram(experts_device, weights_device, weights, experts, free):
            return _with_in_dram(model, device, mixtures)
        if offloads_to_dram(weights_device, weights, free):
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
    return _with_in_dram(model, device, [layers])


def _with_in_dram(model: Any, device: torch.device, left: Iterable[nn.Module]) -> Any:
    """The model with all weights except those of the modules in `left` on `device`."""
    inside = {id(part) for module in left for part in module.modules()}
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
