"""The guard of a model's `generate`: creates a HeteroCache if none is passed, and gives one thread exclusive use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hetero_kv.adapter.cache_argument import as_cache, cache_name, passed_cache, renamed
from hetero_kv.adapter.cacheless import refuse_other_caches
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import HeteroKVError, UnsupportedModelError

_BATCHING = ("generate_batch", "init_continuous_batching")
# The cache implementations that mean transformers' default cache.
_USUAL = ("dynamic", "hybrid")
_MARK = "is_guard_of_hetero_kv"


def guard_generation(model: Any, new_cache: Callable[[], HeteroCache]) -> None:
    """Wrap `model.generate`, if the model has one; `unguard_generation` removes the wrapper."""
    if not callable(getattr(model, "generate", None)):
        return
    guards = {"generate": _guarded(model, model.generate, new_cache)}
    guards |= {name: _refused(getattr(model, name)) for name in _BATCHING if hasattr(model, name)}
    for name, guard in guards.items():
        setattr(guard, _MARK, True)
        setattr(model, name, guard)


def unguard_generation(model: Any) -> None:
    """Restore the methods that the model had before `guard_generation`."""
    for name in ("generate", *_BATCHING):
        method = model.__dict__.get(name)
        if not getattr(method, _MARK, False):
            continue
        delattr(model, name)
        # Restore a method that was set on the instance; otherwise the class's own applies again.
        if getattr(method.__wrapped__, "__func__", None) is not getattr(type(model), name, None):
            setattr(model, name, method.__wrapped__)


def _guarded(model: Any, generate: Callable[..., Any], new_cache: Callable[[], HeteroCache]) -> Callable[..., Any]:
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def guarded_generate(*args: Any, **kwargs: Any) -> Any:
        kwargs = renamed(kwargs, cache_name(model.forward))
        bound = signature.bind_partial(*args, **kwargs).arguments
        config, passed = bound.get("generation_config"), passed_cache(kwargs)

        def argument(name: str) -> Any:
            return kwargs.get(name, getattr(config, name, None))

        def setting(name: str) -> Any:
            value = argument(name)
            return getattr(model.generation_config, name, None) if value is None else value

        refuse_other_caches(model, {"past_key_values": passed})
        _refuse_implementation(argument("cache_implementation"))
        if setting("cache_implementation") is not None:
            # The checkpoint's preference among transformers' caches does not apply.
            kwargs = {**kwargs, "cache_implementation": None}
        # Embeddings are passed only once: transformers continues from a cache regardless of use_cache.
        if setting("use_cache") is False and kwargs.get("inputs_embeds") is None:
            if passed is None:
                return generate(*args, **kwargs)
            raise HeteroKVError(
                "generate received use_cache=False (or the model's generation_config sets it) together with a "
                "HeteroCache, which stores every token; omit one of the two"
            )
        cache = new_cache() if passed is None else passed
        named = as_cache(model.forward, cache) if passed is None else {}
        with cache.in_use, _Depth(model, setting("assistant_early_exit")):
            return generate(*args, **{**kwargs, **named})

    return guarded_generate


def _refuse_implementation(name: str | None) -> None:
    if name is not None and name not in _USUAL:
        raise HeteroKVError(
            f"cache_implementation={name!r} selects one of transformers' own caches, but an injected model needs a "
            "HeteroCache; omit it, or call hetero_kv.eject(model) first"
        )


def _refused(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            f"{method.__name__} (continuous batching) keeps keys and values in transformers' own pages; call "
            "model.generate on the injected model, or hetero_kv.eject(model) first"
        )

    return refuse


class _Depth:
    """Within this context early exit of assistants may change the number of layers; afterwards it is restored."""

    def __init__(self, model: Any, early_exit: int | None) -> None:
        walker = getattr(model, getattr(model, "base_model_prefix", ""), model)
        self._config = None if early_exit is None else walker.config

    def __enter__(self) -> None:
        self._before = getattr(self._config, "num_hidden_layers", None)

    def __exit__(self, *raised: object) -> None:
        if self._config is not None:
            self._config.num_hidden_layers = self._before
