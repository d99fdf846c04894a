"""Builds modules on the meta device without drawing their initial values, which are none there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

# By name: transformers replaces torch's functions while it builds a model.
_DRAWS = frozenset(
    (
        "kaiming_normal_",
        "kaiming_uniform_",
        "normal_",
        "trunc_normal_",
        "uniform_",
        "xavier_normal_",
        "xavier_uniform_",
    )
)


class NothingDrawn(TorchFunctionMode):
    """Within this context, random values of tensors on the meta device are not drawn.

    torch draws them by code that imports its symbolic shapes, and with them sympy, which takes half a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", None) in _DRAWS:
            tensor = args[0] if args else named["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **named)
