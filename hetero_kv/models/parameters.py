"""Parameters of a model that is built without weights: set them, tie them, and check that all are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero_kv.models.errors import ModelError


def set_parameter(module: Any, leaf: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of a module, or of the module that an operator wraps."""
    while leaf not in module._parameters:
        module = module.wrapped
    module._parameters[leaf] = parameter


def set_tensor(module: Any, leaf: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer of a module, or of the module that an operator wraps."""
    while leaf not in module._parameters and leaf not in module._buffers:
        module = module.wrapped
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def parameter_dtype(model: Any, path: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in a model of `dtype`; like transformers, it keeps some parameters in float32."""
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    with_float16 = getattr(model, "_keep_in_fp32_modules", None) or ()
    names = (*always, *(with_float16 if dtype is torch.float16 else ()))
    parts = path.split(".")
    return torch.float32 if any(name in parts for name in names) else dtype


def tied_parameters(model: Any) -> dict[str, str]:
    """The parameters that the model ties to another one: path -> the path of the one in the file."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.replace(".wrapped.", ".")
        if id(parameter) in first and first[id(parameter)] != plain:
            tied[plain] = first[id(parameter)]
        first.setdefault(id(parameter), plain)
    return tied


def tie(model: nn.Module, place: str, source: str) -> None:
    """Tie the parameter at path `place` to the one at path `source`; a packed one is shared in packed form."""
    (path, _, leaf), (source_path, _, source_leaf) = place.rpartition("."), source.rpartition(".")
    module, other = model.get_submodule(path), model.get_submodule(source_path)
    share = getattr(module, "share", None)
    if share is not None and hasattr(other, "load_blocks") and share(other):
        return
    numbers = getattr(other, source_leaf)
    parameter = (
        numbers
        if isinstance(numbers, nn.Parameter)
        else nn.Parameter(numbers.as_subclass(torch.Tensor), requires_grad=False)
    )
    set_parameter(module, leaf, parameter)


def require_all_loaded(model: Any, path: Path) -> None:
    """Raise ModelError if parameters are still without weights, which `path` should contain."""
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(
            f"{str(path)!r} has no weights for {len(left)} parameters of {type(model).__name__} "
            f"({', '.join(left[:3])}, …); give weights that belong to the configuration"
        )


def require_finite(model: Any, name: str) -> None:
    """Raise ModelError if parameters in float16 are not finite; files may have numbers beyond its range."""
    for path, parameter in model.named_parameters():
        if parameter.dtype is torch.float16 and not parameter.is_meta and not parameter.isfinite().all():
            raise ModelError(
                f"{name} has numbers in {path.replace('.wrapped.', '.')} that float16 does not hold; set dtype to "
                "bfloat16 or float32"
            )
