"""transformers' cache layers, for model layers without an operator: rollback, fork, rows, files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from hetero_kv.engine import recurrent_state
from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart

C = TypeVar("C", bound=Cache)

_GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
_PARTS = ("keys", "values", "is_initialized", "cumulative_length")


def snapshot(layer: CacheLayerMixin) -> dict[str, Any]:
    """The state for `rollback`. Dynamic layers grow by concatenation, so that earlier tensors stay valid."""
    if recurrent_state.is_state(layer):
        return recurrent_state.snapshot(layer)
    return {name: layer.__dict__[name] for name in _PARTS if name in layer.__dict__}


def rollback(layer: CacheLayerMixin, state: dict[str, Any]) -> None:
    """Restore the state at `snapshot`."""
    if recurrent_state.is_state(layer):
        return recurrent_state.rollback(layer, state)
    layer.__dict__.update(state)


def fork(layer: CacheLayerMixin, memo: dict[int, Any]) -> CacheLayerMixin:
    """A second layer with the same tokens."""
    if recurrent_state.is_state(layer):
        return recurrent_state.fork(layer)
    # These layers replace their tensors and never write to them.
    if type(layer) in _GROWING:
        return copy.copy(layer)
    return copy.deepcopy(layer, memo)


def can_crop(layer: CacheLayerMixin, length: int | None = None) -> bool:
    """Whether the layer can drop its tokens from position `length` on (None: from any on)."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        # A full window has lost older tokens.
        return length is not None and layer.cumulative_length < layer.sliding_window
    return isinstance(layer, DynamicLayer | DummyLayer)


def checkpoint(layer: CacheLayerMixin) -> LayerCheckpoint | None:
    """A copy of the state for a layer that cannot drop tokens; None for a layer of an unknown kind."""
    if not can_be_saved(layer):
        return None
    return LayerCheckpoint(snapshot(layer), sum(tensor.nbytes for tensor in tensors(layer)))


def tensors(layer: CacheLayerMixin) -> list[torch.Tensor]:
    """The tensors of the layer."""
    if recurrent_state.is_state(layer):
        return list(recurrent_state.named_states(layer).values())
    return [tensor for tensor in (layer.keys, layer.values) if tensor is not None]


def select(layer: CacheLayerMixin, rows: Sequence[int]) -> None:
    """Make row i the present row `rows[i]`."""
    layer.reorder_cache(torch.tensor(rows, dtype=torch.int64))


def can_be_saved(layer: CacheLayerMixin) -> bool:
    """Whether `saved` supports layers of this kind."""
    return recurrent_state.is_state(layer) or type(layer) in (*_GROWING, DummyLayer)


def saved(layer: CacheLayerMixin, layer_idx: int) -> SavedPart:
    """The data that `restore` needs. Raises ContextError for a layer of an unsupported kind."""
    if recurrent_state.is_state(layer):
        return recurrent_state.saved(layer)
    if not can_be_saved(layer):
        raise ContextError(
            f"layer {layer_idx} is transformers' own {type(layer).__name__}, which cannot be saved; supported are "
            f"{', '.join(kind.__name__ for kind in _GROWING)}, recurrent states, and layers with an operator"
        )
    if isinstance(layer, DummyLayer):
        return SavedPart()
    part = SavedPart(numbers={"seen": getattr(layer, "cumulative_length", None)})
    if layer.is_initialized:
        part.put(keys=layer.keys, values=layer.values)
    return part


def restore(layer: CacheLayerMixin, part: SavedPart, target: RestoreTarget, length: int) -> None:
    """Restore an empty layer of `length` tokens from saved data. Raises DamagedContextError when that does not fit."""
    if recurrent_state.is_state(layer):
        return recurrent_state.restore(layer, part, target)
    if isinstance(layer, DummyLayer):
        return None
    stored = length
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = part.integer("seen", length, length)
        stored = min(length, layer.sliding_window - 1)
    layer.lazy_initialization(target.keys, target.values)
    layer.keys, layer.values = part.like("keys", target.keys, stored), part.like("values", target.values, stored)


def forked(cache: C) -> C:
    """A second cache with the same tokens: a HeteroCache's fork, or a copy of a transformers cache."""
    fork_of = getattr(cache, "fork", None)
    if fork_of is not None:
        return fork_of()
    clone = copy.copy(cache)
    memo: dict[int, Any] = {}
    clone.layers = [fork(layer, memo) for layer in cache.layers]
    return clone
