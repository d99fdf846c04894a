"""Cache layers of modules that are no attention (gated delta nets, Mamba, short convolutions): their state.

It does not grow with the sequence, and the modules write to it in place: whoever wants to come back to it, or to go two
ways, copies it. No earlier token can be found in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from hetero_kv.engine.saved_part import Place, SavedPart

_TENSORS = ("conv_states", "recurrent_states")
_NOTES = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
_SCALARS = ("dtype", "device")


@dataclass(frozen=True)
class StateShape:
    """What a layer's state is, for one row: name -> tensor on the meta device, [1, ...]; see `named_states`."""

    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Memory of a row's state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def is_state(layer: Any) -> bool:
    """Whether a cache layer holds a state of fixed size and nothing else."""
    return type(layer) is LinearAttentionLayer


def named_states(layer: LinearAttentionLayer) -> dict[str, torch.Tensor]:
    """The tensors that a layer holds, [rows, ...] each: "conv_states.0", "recurrent_states.0", …"""
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
    """Come back to the state at `snapshot`, which may be asked for again."""
    twin = copy.copy(layer)
    twin.__dict__.update(state)
    layer.__dict__.update(snapshot(twin))


def fork(layer: LinearAttentionLayer) -> LinearAttentionLayer:
    """A second layer with the same state."""
    twin = copy.copy(layer)
    twin.__dict__.update(snapshot(layer))
    return twin


def saved(layer: LinearAttentionLayer) -> SavedPart:
    """What `restore` needs."""
    part = SavedPart()
    part.put(**named_states(layer))
    return part


def restore(layer: LinearAttentionLayer, part: SavedPart, place: Place) -> None:
    """Let an empty layer have the state that `saved` told. Raises DamagedContextError where it can have none such."""
    rows = len(place.keys)
    for name, shape in place.states.items():
        state = part.tensor(name, (rows, *shape.shape[1:]), shape.dtype, place.keys.device)
        kind, number = name.split(".")
        index = int(number)
        # Files are mapped, and the state is written to in place.
        getattr(layer, kind)[index] = state.clone()
        getattr(layer, f"is_{kind}_initialized")[index] = layer.has_previous_state[index] = True
        if kind == "conv_states":
            layer.conv_kernel_size[index] = state.shape[-1]
            layer.dtype, layer.device = state.dtype, state.device
