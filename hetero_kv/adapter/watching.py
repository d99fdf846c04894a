"""Who listens to a model's modules, or has put something in their place."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module


def is_watched(module: nn.Module) -> bool:
    """Whether somebody listens to one of the modules in `module`, itself included, or has replaced its forward."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(
        each._forward_hooks or each._forward_pre_hooks or "forward" in each.__dict__ for each in module.modules()
    )
