"""The tensors that a model computes with, including offloaded ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hetero_kv.adapter.foreign import PLAIN_TENSORS
from hetero_kv.adapter.replacement import Operator
from hetero_kv.contexts.active_state import ActivePart, active_parts
from hetero_kv.engine.errors import ContextError

# RoPE types whose frequencies change from prompt to prompt.
_CHANGING = ("dynamic", "longrope")
_FREQUENCIES = "inv_freq"


def active_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the original model, tensor) of each parameter and buffer of the active parts (`active_parts`), once.

    Of the buffers it yields persistent ones, packed weights, and constant RoPE frequencies.

    Raises ContextError for a tensor whose numbers cannot be read.
    """
    seen: set[int] = set()
    for part in active_parts(model):
        for name, tensor in own_tensors(part):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield from _plain_ones(f"{part.path}.{name}", _there(model, part, name, tensor))


def own_tensors(part: ActivePart) -> Iterator[tuple[str, torch.Tensor]]:
    """The relevant parameters and buffers of a module, without its children's."""
    module = part.module
    is_ours = isinstance(module, Operator)
    for name, tensor in module._parameters.items():
        if tensor is not None and not is_ours and name not in part.idle:
            yield name, tensor
    for name, buffer in module._buffers.items():
        is_kept = name not in module._non_persistent_buffers_set
        if buffer is not None and (is_ours or is_kept or (_FREQUENCIES in name and not _changes(module))):
            yield name, buffer


def frequencies_change(model: nn.Module) -> bool:
    """Whether RoPE frequencies of a model depend on the longest sequence of a forward (`dynamic`, `longrope`)."""
    return any(_changes(module) for module in model.modules())


def _changes(rotary: Any) -> bool:
    return any(kind in str(getattr(rotary, "rope_type", "")) for kind in _CHANGING)


def _there(model: nn.Module, part: ActivePart, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for one that accelerate has offloaded, the tensor that its hook loads for a forward."""
    if not tensor.is_meta:
        return tensor
    steps = part.place.split(".") if part.place else []
    for depth in range(len(steps), -1, -1):
        holder = model.get_submodule(".".join(steps[:depth]))
        hook = holder.__dict__.get("_hf_hook")
        for each in (hook, *getattr(hook, "hooks", ())):
            weights: Mapping[str, torch.Tensor] | None = getattr(each, "weights_map", None)
            leaf = ".".join([*(step for step in steps[depth:] if step != "wrapped"), name])
            if weights is not None:
                try:
                    return weights[leaf]
                except KeyError:
                    continue
    raise ContextError(
        f"{part.place}.{name} is on the meta device, and no hook has its numbers, so a saved context cannot depend on "
        "them; load the model without offloading"
    )


def _plain_ones(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor consists of."""
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in PLAIN_TENSORS:
        inside, context = tensor.__tensor_flatten__()
        for each in inside:
            yield from _plain_ones(f"{name}.{each} {context}", getattr(tensor, each))
    elif type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
        yield name, tensor
    else:
        raise ContextError(
            f"{name} is a {type(tensor).__name__}, which may have more state than its numbers, so a saved context "
            "cannot depend on it; load the model with plain or GGUF weights"
        )
