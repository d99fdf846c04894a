"""transformers' own cache layers, of model layers without an operator: going back, going several ways, rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

C = TypeVar("C", bound=Cache)

_PARTS = ("keys", "values", "is_initialized", "cumulative_length")


def snapshot(layer: CacheLayerMixin) -> dict[str, Any]:
    """What `rollback` needs. Dynamic layers grow by concatenation, so that the old tensors stay valid."""
    return {name: layer.__dict__[name] for name in _PARTS if name in layer.__dict__}


def rollback(layer: CacheLayerMixin, state: dict[str, Any]) -> None:
    """Come back to the state at `snapshot`."""
    layer.__dict__.update(state)


def fork(layer: CacheLayerMixin, memo: dict[int, Any]) -> CacheLayerMixin:
    """A second layer with the same tokens."""
    # These never write to a tensor that they hold.
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return copy.copy(layer)
    return copy.deepcopy(layer, memo)


def select(layer: CacheLayerMixin, rows: Sequence[int]) -> None:
    """Let row i be what row `rows[i]` was."""
    layer.reorder_cache(torch.tensor(rows, dtype=torch.int64))


def forked(cache: C) -> C:
    """A second cache with the same tokens: a HeteroCache's fork, or one of transformers' own."""
    fork_of = getattr(cache, "fork", None)
    if fork_of is not None:
        return fork_of()
    twin = copy.copy(cache)
    memo: dict[int, Any] = {}
    twin.layers = [fork(layer, memo) for layer in cache.layers]
    return twin
