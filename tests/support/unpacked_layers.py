"""Packed linear layers of an injected model as layers of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def unpack(parent: Any, *names: str) -> None:
    """Replace packed linear layers of a module by plain ones with the same weights."""
    for name in names:
        packed = getattr(parent, name)
        numbers = nn.Linear(packed.in_features, packed.out_features, bias=False)
        numbers.weight = nn.Parameter(packed.weight.clone().as_subclass(torch.Tensor), requires_grad=False)
        setattr(parent, name, numbers)
