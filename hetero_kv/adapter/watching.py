"""Who listens to a model's modules, or has put something in their place."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module


def is_heard(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether somebody listens to `module` or one of the modules in it, but for what is within those of a kind."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    return not isinstance(module, kind) and any(is_heard(child, kind) for child in module.children())


def is_watched(module: nn.Module) -> bool:
    """Whether somebody listens to one of the modules in `module`, itself included, or has replaced its forward."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(
        each._forward_hooks or each._forward_pre_hooks or "forward" in each.__dict__ for each in module.modules()
    )
