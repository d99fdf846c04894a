"""Modules on a device, simulated or real."""

from __future__ import annotations

import torch
from torch import nn

from simulated_cuda.tensor import SimulatedTensor


def placed(model: nn.Module, device: torch.device | str = "cuda") -> nn.Module:
    """The model with its parameters and buffers on `device`, which may be a simulated one."""
    device = torch.device(device)
    if SimulatedTensor.simulation is None or device.type != "cuda":
        return model.to(device)
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    data = tensor.data.to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(data, requires_grad=False) if is_parameter else data
                owned[name] = moved[id(tensor)]
    return model
