"""A model's forward, guarded: what does not fit or cannot be computed is refused before anything is stored, and a
forward that fails half-way leaves every layer of the cache as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoints import undo_on_error
from hetero_kv.engine.strides import call_shape, driven, driving

_RECORDED = ("output_hidden_states", "output_attentions")


def guarded(model: Any) -> Callable[..., Any]:
    """`model.forward` with the guard around it; `model` is the module that walks through the layers.

    Raises, when called with a HeteroCache:
        CacheFullError: the new tokens do not fit into every layer.
        UnsupportedModelError: the model's config asks to record what chunks would garble.
    """
    forward = model.forward

    @functools.wraps(forward)
    def guarded_forward(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = _cache_among(given)
        if cache is None:
            return forward(*args, **kwargs)
        drive = driving(cache)
        if drive is not None and drive.replayed is not None:
            return drive.replayed
        for name in _RECORDED:
            if getattr(model.config, name, False) or kwargs.get(name):
                raise UnsupportedModelError(
                    f"{name} would be recorded once per chunk and layer; ask for it without a HeteroCache, after "
                    "hetero_kv.eject(model)"
                )
        if drive is None and cache.bounded_layers:
            with undo_on_error(cache):
                return driven(forward, cache, args, kwargs, has_head=False)
        batch, tokens = call_shape(forward, args, kwargs)
        cache.require_room(batch=batch, tokens=tokens)
        with undo_on_error(cache):
            output = forward(*args, **kwargs)
        if drive is not None:
            drive.hidden = output
        return output

    return guarded_forward


def driven_whole(model: Any) -> Callable[..., Any]:
    """The forward of a whole model with bounded layers, head included: its prompts may pass in strides."""
    forward = model.forward

    @functools.wraps(forward)
    def driven_forward(*args: Any, **kwargs: Any) -> Any:
        cache = _cache_among((*args, *kwargs.values()))
        if cache is None or not cache.bounded_layers or driving(cache) is not None:
            return forward(*args, **kwargs)
        with undo_on_error(cache):
            return driven(forward, cache, args, kwargs, has_head=True)

    return driven_forward


def _cache_among(given: tuple[Any, ...]) -> HeteroCache | None:
    return next((value for value in given if isinstance(value, HeteroCache)), None)
