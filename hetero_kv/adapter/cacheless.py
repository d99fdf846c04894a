"""A call of an injected model without a HeteroCache: it gets a new one, as transformers creates a cache by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from hetero_kv.adapter.cache_argument import CACHE_NAMES, as_cache
from hetero_kv.adapter.model_call import ModelCall
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import HeteroKVError, UnsupportedModelError

_NAME = "past_key_values"


def without_cache(
    model: Any, call: ModelCall, new_cache: Callable[[], HeteroCache], forward: Callable[..., Any]
) -> Any:
    """The output of a call over a new cache.

    The output includes the cache, unless the call or the config sets use_cache=False.

    Args:
        forward: the forward that computes the call.

    Raises:
        HeteroKVError: the call has a cache of transformers' own, or computes with a cache of another kind.
        UnsupportedModelError: positions pack several sequences in a row.
    """
    refuse_other_caches(model, call.arguments)
    _refuse_packed(call)
    returns_cache = call.arguments.get("use_cache")
    if returns_cache is None:
        returns_cache = getattr(model.config, "use_cache", True)
    cache = new_cache()
    output = forward(**{**call.arguments, **as_cache(forward, cache), "use_cache": True})
    return output if returns_cache else _without(cache, output)


def refuse_other_caches(model: Any, arguments: dict[str, Any]) -> None:
    """Raise HeteroKVError for a cache that is not a HeteroCache."""
    for name, value in arguments.items():
        if (name in CACHE_NAMES and value is not None and not isinstance(value, HeteroCache)) or (
            isinstance(value, Cache) and not isinstance(value, HeteroCache)
        ):
            raise HeteroKVError(
                f"{type(model).__name__} was called with {name}, a {type(value).__name__}{_size(value)}, but without "
                f"a HeteroCache: pass {_NAME}=HeteroCache(model), or omit the argument, or call "
                "hetero_kv.eject(model) first. A HeteroCache cannot take keys and values that were computed outside "
                "of it (PEFT's prefix tuning)"
            )


def _size(cache: Any) -> str:
    tokens = cache.get_seq_length() if isinstance(cache, Cache) else 0
    return f" of {tokens} tokens" if tokens else ""


def _refuse_packed(call: ModelCall) -> None:
    """Raise for restarting positions, which transformers treats as packed sequences."""
    positions = call.arguments.get("position_ids")
    if (
        isinstance(positions, torch.Tensor)
        and positions.dim() == 2
        and call.arguments.get("attention_mask") is None
        and bool((positions.diff() != 1).any())
    ):
        raise UnsupportedModelError(
            "position_ids restart within a row, as in packed sequences, which attend only to themselves; pass each "
            "sequence as a row, left-padded and with an attention_mask"
        )


def _without(cache: HeteroCache, output: Any) -> Any:
    if isinstance(output, ModelOutput):
        for name in CACHE_NAMES:
            if output.get(name) is cache:
                output[name] = None
        return output
    return tuple(part for part in output if part is not cache) if isinstance(output, tuple) else output
