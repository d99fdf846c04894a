"""transformers' own cache layers, of model layers without an operator: going back, going several ways, rows, files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hetero_kv.engine import recurrent_state
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.saved_part import Place, SavedPart

C = TypeVar("C", bound=Cache)

_GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
_PARTS = ("keys", "values", "is_initialized", "cumulative_length")


def snapshot(layer: CacheLayerMixin) -> dict[str, Any]:
    """What `rollback` needs. Dynamic layers grow by concatenation, so that the old tensors stay valid."""
    if recurrent_state.is_state(layer):
        return recurrent_state.snapshot(layer)
    return {name: layer.__dict__[name] for name in _PARTS if name in layer.__dict__}


def rollback(layer: CacheLayerMixin, state: dict[str, Any]) -> None:
    """Come back to the state at `snapshot`."""
    if recurrent_state.is_state(layer):
        return recurrent_state.rollback(layer, state)
    layer.__dict__.update(state)


def fork(layer: CacheLayerMixin, memo: dict[int, Any]) -> CacheLayerMixin:
    """A second layer with the same tokens."""
    if recurrent_state.is_state(layer):
        return recurrent_state.fork(layer)
    # These never write to a tensor that they hold.
    if type(layer) in _GROWING:
        return copy.copy(layer)
    return copy.deepcopy(layer, memo)


def tensors(layer: CacheLayerMixin) -> list[torch.Tensor]:
    """What the layer holds."""
    if recurrent_state.is_state(layer):
        return list(recurrent_state.named_states(layer).values())
    return [tensor for tensor in (layer.keys, layer.values) if tensor is not None]


def select(layer: CacheLayerMixin, rows: Sequence[int]) -> None:
    """Let row i be what row `rows[i]` was."""
    layer.reorder_cache(torch.tensor(rows, dtype=torch.int64))


def saved(layer: CacheLayerMixin, layer_idx: int) -> SavedPart:
    """What `restore` needs. Raises ContextError for a layer of another kind than these."""
    if recurrent_state.is_state(layer):
        return recurrent_state.saved(layer)
    if type(layer) not in _GROWING:
        raise ContextError(
            f"layer {layer_idx} is one of transformers' own, {type(layer).__name__}, which is not known to be saved; "
            f"what is: {', '.join(kind.__name__ for kind in _GROWING)}, states, and layers with an operator"
        )
    part = SavedPart(numbers={"seen": getattr(layer, "cumulative_length", None)})
    if layer.is_initialized:
        part.put(keys=layer.keys, values=layer.values)
    return part


def restore(layer: CacheLayerMixin, part: SavedPart, place: Place, length: int) -> None:
    """Let an empty layer hold what `saved` told of `length` tokens. Raises DamagedContextError where that cannot be."""
    if recurrent_state.is_state(layer):
        return recurrent_state.restore(layer, part, place)
    held = length
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = part.integer("seen", length, length)
        held = min(length, layer.sliding_window - 1)
    layer.lazy_initialization(place.keys, place.values)
    layer.keys, layer.values = part.like("keys", place.keys, held), part.like("values", place.values, held)


def forked(cache: C) -> C:
    """A second cache with the same tokens: a HeteroCache's fork, or one of transformers' own."""
    fork_of = getattr(cache, "fork", None)
    if fork_of is not None:
        return fork_of()
    twin = copy.copy(cache)
    memo: dict[int, Any] = {}
    twin.layers = [fork(layer, memo) for layer in cache.layers]
    return twin
