"""A model's `generate`, guarded: it works over a HeteroCache of its own where none is given, and alone on it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hetero_kv.adapter.cache_argument import as_cache, given_cache
from hetero_kv.adapter.cacheless import refuse_other_caches
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import HeteroKVError, UnsupportedModelError

_BATCHING = ("generate_batch", "init_continuous_batching")
# Of transformers' caches the one that takes the place of none at all.
_USUAL = ("dynamic", "hybrid")
_MARK = "is_guard_of_hetero_kv"


def guard_generation(model: Any, new_cache: Callable[[], HeteroCache]) -> None:
    """Put the guard around `model.generate`, where the model has one; `unguard_generation` takes it off."""
    if not callable(getattr(model, "generate", None)):
        return
    guards = {"generate": _guarded(model, model.generate, new_cache)}
    guards |= {name: _refused(getattr(model, name)) for name in _BATCHING if hasattr(model, name)}
    for name, guard in guards.items():
        setattr(guard, _MARK, True)
        setattr(model, name, guard)


def unguard_generation(model: Any) -> None:
    """Let the model have the methods that it had before `guard_generation`."""
    for name in ("generate", *_BATCHING):
        method = model.__dict__.get(name)
        if not getattr(method, _MARK, False):
            continue
        delattr(model, name)
        # One that somebody else had put there; the class has its own.
        if getattr(method.__wrapped__, "__func__", None) is not getattr(type(model), name, None):
            setattr(model, name, method.__wrapped__)


def _guarded(model: Any, generate: Callable[..., Any], new_cache: Callable[[], HeteroCache]) -> Callable[..., Any]:
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def guarded_generate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs).arguments
        config, given = bound.get("generation_config"), given_cache(kwargs)

        def told(name: str) -> Any:
            return kwargs.get(name, getattr(config, name, None))

        def setting(name: str) -> Any:
            value = told(name)
            return getattr(model.generation_config, name, None) if value is None else value

        refuse_other_caches(model, {"past_key_values": given})
        _refuse_implementation(told("cache_implementation"))
        if setting("cache_implementation") is not None:
            # What a checkpoint prefers among transformers' own caches.
            kwargs = {**kwargs, "cache_implementation": None}
        # Embeddings are passed once: transformers goes on from a cache whatever it is told.
        if setting("use_cache") is False and kwargs.get("inputs_embeds") is None:
            if given is None:
                return generate(*args, **kwargs)
            raise HeteroKVError(
                "generate was given use_cache=False (or the model's generation_config says so) beside a HeteroCache, "
                "in which every token is stored; leave one of the two out"
            )
        cache = new_cache() if given is None else given
        named = as_cache(model.forward, cache) if given is None else {}
        with cache.in_use, _Depth(model, setting("assistant_early_exit")):
            return generate(*args, **{**kwargs, **named})

    return guarded_generate


def _refuse_implementation(name: str | None) -> None:
    if name is not None and name not in _USUAL:
        raise HeteroKVError(
            f"cache_implementation={name!r} chooses one of transformers' own caches, and an injected model computes "
            "with a HeteroCache; leave it out, or call hetero_kv.eject(model) first"
        )


def _refused(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            f"{method.__name__} (continuous batching) keeps keys and values in pages of transformers' own; call "
            "model.generate on the injected model, or hetero_kv.eject(model) first"
        )

    return refuse


class _Depth:
    """Within this context assistants that exit early may change the number of layers; behind it, it is what it was."""

    def __init__(self, model: Any, early_exit: int | None) -> None:
        walker = getattr(model, getattr(model, "base_model_prefix", ""), model)
        self._config = None if early_exit is None else walker.config

    def __enter__(self) -> None:
        self._before = getattr(self._config, "num_hidden_layers", None)

    def __exit__(self, *raised: object) -> None:
        if self._config is not None:
            self._config.num_hidden_layers = self._before
