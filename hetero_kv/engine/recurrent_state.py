"""Cache layers of recurrent modules (gated delta nets, Mamba, short convolutions): their state.

The state has a fixed size, and the modules write to it in place. Rollback and fork therefore copy it. It does not
contain earlier tokens.

A layer of the model may have both attention and a recurrent module (Falcon-H1). Its state then lies in a cache layer of
its own, behind those of all layers of the model (`StateBeside`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hetero_kv.engine.saved_part import RestoreTarget, SavedPart

_TENSORS = ("conv_states", "recurrent_states")
_NOTES = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
_SCALARS = ("dtype", "device")


@dataclass(frozen=True)
class StateShape:
    """The state of a layer for one row: name -> tensor on the meta device, [1, ...]; see `named_states`."""

    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Memory of a row's state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class StateBeside(LinearAttentionLayer):
    """The state of a layer of the model that also has keys and values, whose own cache layer is another one.

    Args:
        layer_idx: the index of that layer of the model.
        number_of_states: as transformers' layer takes it.
    """

    def __init__(self, layer_idx: int, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.layer_idx = layer_idx


def parted(layer: Any, layer_idx: int) -> tuple[CacheLayerMixin, StateBeside | None]:
    """An empty cache layer of transformers, and the state apart from it if it has keys and values too, else None."""
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return DynamicLayer(), StateBeside(layer_idx, layer.number_of_states)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return DynamicSlidingWindowLayer(layer.sliding_window), StateBeside(layer_idx, layer.number_of_states)
    return layer, None


def state_layer(cache: Any, layer_idx: int) -> Any:
    """The cache layer of any transformers cache that has the state of a layer of the model."""
    place = getattr(cache, "state_place", None)
    return cache.layers[layer_idx if place is None else place(layer_idx)]


def is_state(layer: Any) -> bool:
    """Whether a cache layer has only a state of fixed size."""
    return type(layer) in (LinearAttentionLayer, StateBeside)


def named_states(layer: LinearAttentionLayer) -> dict[str, torch.Tensor]:
    """The tensors of a layer by name, [rows, ...] each: "conv_states.0", "recurrent_states.0", …"""
    return {
        f"{kind}.{index}": tensor
        for kind in _TENSORS
        for index, tensor in getattr(layer, kind).items()
        if tensor is not None
    }


def snapshot(layer: LinearAttentionLayer) -> dict[str, Any]:
    """A copy of the state."""
    copied: dict[str, Any] = {name: getattr(layer, name) for name in _SCALARS}
    copied |= {name: dict(getattr(layer, name)) for name in _NOTES}
    for name in _TENSORS:
        states = getattr(layer, name).items()
        copied[name] = {index: None if state is None else state.clone() for index, state in states}
    return copied


def rollback(layer: LinearAttentionLayer, state: Mapping[str, Any]) -> None:
    """Restore the state at `snapshot`. `state` stays valid for another rollback."""
    clone = copy.copy(layer)
    clone.__dict__.update(state)
    layer.__dict__.update(snapshot(clone))


def fork(layer: LinearAttentionLayer) -> LinearAttentionLayer:
    """A second layer with the same state."""
    clone = copy.copy(layer)
    clone.__dict__.update(snapshot(layer))
    return clone


def saved(layer: LinearAttentionLayer) -> SavedPart:
    """The data that `restore` needs."""
    part = SavedPart()
    part.put(**named_states(layer))
    return part


def restore(layer: LinearAttentionLayer, part: SavedPart, target: RestoreTarget) -> None:
    """Restore an empty layer's state from `saved`'s data. Raises DamagedContextError for data that does not fit."""
    rows = len(target.keys)
    for name, shape in target.states.items():
        state = part.tensor(name, (rows, *shape.shape[1:]), shape.dtype, target.keys.device)
        kind, number = name.split(".")
        index = int(number)
        # The state is written to in place, so that the mapped file is copied.
        getattr(layer, kind)[index] = state.clone()
        getattr(layer, f"is_{kind}_initialized")[index] = layer.has_previous_state[index] = True
        if kind == "conv_states":
            layer.conv_kernel_size[index] = state.shape[-1]
            layer.dtype, layer.device = state.dtype, state.device
