"""Properties of an attention module and of its model's config: layer index, interface, sliding window."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache

from hetero_kv.adapter.recurrent import is_recurrent
from hetero_kv.errors import UnsupportedModelError

#: The layer type of attention within chunks of the text.
CHUNKED = "chunked_attention"


def text_config(model: Any) -> Any:
    """The config of the model's decoder."""
    return model.config.get_text_config(decoder=True)


def require_attention_interface(path: str, module: nn.Module) -> None:
    """Raise UnsupportedModelError unless this attention module goes through transformers' attention interface."""
    forward = inspect.unwrap(type(module).forward)
    used = set(forward.__code__.co_names)
    reason = None
    if "ALL_ATTENTION_FUNCTIONS" not in used:
        reason = "its attention does not go through transformers' attention interface (ALL_ATTENTION_FUNCTIONS)"
    elif "update" not in used:
        reason = "its forward does not pass its keys and values to a transformers cache"
    elif not isinstance(getattr(module, "layer_idx", None), int):
        reason = "it has no layer_idx, which selects its cache layer"
    elif getattr(module, "is_cross_attention", False):
        reason = "it is cross-attention"
    elif getattr(module, "is_kv_shared_layer", False):
        reason = "it uses the keys and values of another layer"
    elif is_passed_repeatedly(module):
        reason = "a token passes it several times, with keys and values of each"
    if reason:
        raise UnsupportedModelError(f"{path} ({type(module).__name__}) cannot be replaced: {reason}")


def is_passed_repeatedly(module: nn.Module) -> bool:
    """Whether a token passes an attention module several times, with a separate cache layer each time (HRM-Text)."""
    return "cycle_offset" in inspect.signature(type(module).forward).parameters


def has_no_cache(layer: Any) -> bool:
    """Whether a decoder layer is a block of an MLP or of experts alone, by its model's config (Nemotron-H)."""
    types = getattr(getattr(layer, "config", None), "layer_types", None)
    index = getattr(layer, "layer_idx", None)
    return types is not None and isinstance(index, int) and types[index] in ("mlp", "moe")


def is_attention(module: nn.Module) -> bool:
    """Whether a module looks like a decoder's attention: it has a cache layer's index and is not recurrent."""
    has_index = isinstance(getattr(module, "layer_idx", None), int)
    return has_index and "attention" in type(module).__name__.lower() and not is_recurrent(module)


def layer_window(module: nn.Module) -> int | None:
    """The most keys that a query of an attention module sees; None for full attention.

    They are the last ones (a sliding window), or those of the query's own chunk (`is_chunked`).

    Raises UnsupportedModelError for another layer type (linear, indexed, …).
    """
    config: Any = module.config
    types = getattr(config, "layer_types", None)
    if types is None:
        return getattr(config, "sliding_window", None)
    layer_type = types[module.layer_idx]
    if layer_type in ("full_attention", "hybrid"):
        return None
    if layer_type in ("sliding_attention", "hybrid_sliding"):
        return config.sliding_window
    if layer_type == CHUNKED:
        return config.attention_chunk_size
    raise UnsupportedModelError(
        f"layer {module.layer_idx} of {type(module).__name__} has the layer type {layer_type!r}; hetero_kv knows "
        "full_attention, sliding_attention, chunked_attention, hybrid and hybrid_sliding"
    )


def is_chunked(module: nn.Module) -> bool:
    """Whether a query sees the keys of the chunk that it is in, and none of earlier chunks (Llama 4)."""
    types = getattr(module.config, "layer_types", None)
    return types is not None and types[module.layer_idx] == CHUNKED


def has_window(module: nn.Module) -> bool:
    """Whether a module is an attention module with a `layer_window`."""
    return hasattr(module, "config") and hasattr(module, "layer_idx") and layer_window(module) is not None


def own_windows(config: Any) -> list[int | None]:
    """Per layer, the sliding window of transformers' own cache; None if it keeps everything."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
