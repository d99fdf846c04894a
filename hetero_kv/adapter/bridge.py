"""The bridge to transformers' internals: the attention function and mask function `hetero_kv`.

Every transformers attention module ends in the same two calls: `past_key_values.update(k, v, layer_idx)` and
`ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation)`. An attention operator wraps such a module and
gives it a private config whose implementation is `hetero_kv`. This is how it receives the queries, keys and values of
any model after projections, norms and rotary embedding.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from hetero_kv.adapter.attention_module import is_chunked, layer_window
from hetero_kv.adapter.cache_argument import CACHE_NAMES, as_cache, passed_cache
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import HeteroKVError, UnsupportedModelError

IMPLEMENTATION = "hetero_kv"


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a model's call of its attention function.

    Attributes:
        q: [batch, heads, tokens, k_dim].
        k: [batch, kv_heads, tokens, k_dim], of the new tokens only.
        v: [batch, kv_heads, tokens, v_dim], of the new tokens only.
        scale: factor of the scores.
        softcap: score soft-capping (Gemma 2), or None.
        sliding_window: the model's own window, keys that a query sees, or None.
        sink: [heads], learned attention sinks (gpt-oss), or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None
    sliding_window: int | None
    sink: torch.Tensor | None

    def of_rows(self, rows: slice) -> AttentionCall:
        """The call for some rows of the batch."""
        parts = self.q[rows], self.k[rows], self.v[rows]
        return AttentionCall(*parts, self.scale, self.softcap, self.sliding_window, self.sink)

    def of_tokens(self, tokens: slice) -> AttentionCall:
        """The call for some tokens of every row."""
        q, k, v = (each[:, :, tokens] for each in (self.q, self.k, self.v))
        return AttentionCall(q, k, v, self.scale, self.softcap, self.sliding_window, self.sink)

    def as_prompt(self) -> AttentionCall:
        """This call's rows as the tokens of a prompt of one row."""
        q, k, v = (each.transpose(0, 2) for each in (self.q, self.k, self.v))
        return AttentionCall(q, k, v, self.scale, self.softcap, self.sliding_window, self.sink)


class AttentionHandler(Protocol):
    """Computes the attention of a wrapped module."""

    def attend(self, cache: Any, call: AttentionCall) -> torch.Tensor:
        """[batch, heads, tokens, v_dim]."""


@dataclass(slots=True)
class ActiveHandler:
    """One forward of an attention module, and the operator that computes its attention.

    Attributes:
        calls: number of calls of the attention function so far.
    """

    operator: AttentionHandler
    cache: HeteroCache | None
    calls: int = 0


# The handler of the module in progress. It is not in the `ForwardBatch`, because transformers passes its attention
# function neither the cache nor the operator, and probes and trials attend without a cache.
_ACTIVE_HANDLER: ContextVar[ActiveHandler] = ContextVar("ACTIVE_HANDLER")


@contextmanager
def handled_by(operator: AttentionHandler, cache: HeteroCache | None = None) -> Iterator[ActiveHandler]:
    """Within this context `operator` computes the attention of any module that calls the attention function.

    cache: of the forward; None for a probe or a trial, which has none.
    """
    active = ActiveHandler(operator, cache)
    token = _ACTIVE_HANDLER.set(active)
    try:
        yield active
    finally:
        _ACTIVE_HANDLER.reset(token)


# Arguments that some models and `generate` pass, and that do not change the result of attention.
_NO_INFLUENCE = frozenset(
    {
        "assistant_tokenizer",
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "position_embeddings",
        "position_ids",
        "tokenizer",
        "use_cache",
    }
)


# Arguments of a decoder layer that have another meaning.
_OF_LAYERS = frozenset({"attention_mask", "hidden_states", *CACHE_NAMES})


def changes_attention(kwargs: Mapping[str, Any]) -> bool:
    """Whether a decoder layer's keyword arguments include one that may change what attention computes.

    A fused layer skips the attention function's caller. It leaves such arguments to that caller, which refuses unknown
    ones.
    """
    return any(
        value is False if name == "is_causal" else value is not None and value is not False
        for name, value in kwargs.items()
        if name not in _NO_INFLUENCE and name not in _OF_LAYERS
    )


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function `hetero_kv`: passes the call to the operator of the present forward."""
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name}: a custom attention mask was passed; hetero_kv computes causal attention")
    if dropout:
        raise UnsupportedModelError(f"{name}: attention dropout {dropout} is for training; call model.eval()")
    if is_causal is False:
        raise UnsupportedModelError(f"{name}: is_causal=False asks for bidirectional attention, which is not supported")
    for argument, item in kwargs.items():
        if argument not in _NO_INFLUENCE and item is not None and item is not False:
            raise UnsupportedModelError(
                f"{name}: the attention argument {argument}={_brief(item)} is not known to hetero_kv, and no argument "
                "is ignored; leave this layer out with `class: default`"
            )
    if key.dtype is not query.dtype or value.dtype is not query.dtype:
        # torch.autocast rounds values, but not the rotated queries and keys.
        key, value = key.to(query.dtype), value.to(query.dtype)
    call = AttentionCall(
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap or None,
        sliding_window,
        s_aux,
    )
    active = _ACTIVE_HANDLER.get()
    active.calls += 1
    recording = None if active.cache is None else active.cache.required_batch.recording
    if recording is None:
        attended = active.operator.attend(active.cache, call)
    else:
        attended = recording.attended(active.operator, call)
    return attended.transpose(1, 2).contiguous(), None


def _mask_function(
    batch_size: int,
    q_length: int,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> None:
    """The mask function `hetero_kv`: builds no mask, and refuses calls that need one."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModelError(
            f"the attention mask hides {int((~attention_mask.bool()).sum())} tokens, but the call has no HeteroCache "
            "to record padding; pass past_key_values=HeteroCache(model) to the whole model"
        )
    if use_vmap:
        raise UnsupportedModelError(
            "this model adds its own rule to the causal mask (bidirectional image tokens, say), which is not supported"
        )


@cache
def _register() -> None:
    """Register the implementation with transformers.

    Called when a model is changed, not on import: the transformers modules behind it take seconds to import, and the
    command line's flags and help, which list the operators, need none of them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask_function)


def with_implementation(config: Any) -> Any:
    """A shallow copy of a transformers config whose attention implementation is `hetero_kv`.

    Only the owner of the copy is affected: other modules keep the original.
    """
    _register()
    copied = copy.copy(config)
    copied._attn_implementation_internal = IMPLEMENTATION
    return copied


def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> HeteroCache:
    """The HeteroCache among a forward's arguments, under any name.

    Raises HeteroKVError when there is no HeteroCache.
    """
    cache = passed_cache(kwargs)
    if isinstance(cache, HeteroCache):
        return cache
    for value in (*kwargs.values(), *args):
        if isinstance(value, HeteroCache):
            return value
    raise HeteroKVError(
        f"{path} was called without a HeteroCache: pass past_key_values=HeteroCache(model) to model(...) or "
        "model.generate(...), or hetero_kv.eject(model) first"
    )


def chunk_mask(module: nn.Module, cache: HeteroCache, hidden_states: torch.Tensor, position_ids: Any) -> Any:
    """The mask of one chunk for an attention module without an operator, by the rules of its implementation.

    Args:
        module: the attention module, with the model's own config.
        hidden_states: [batch, tokens, hidden] of the chunk.
    """
    from transformers.masking_utils import (
        create_causal_mask,
        create_chunked_causal_mask,
        create_sliding_window_causal_mask,
    )

    of_window = create_chunked_causal_mask if is_chunked(module) else create_sliding_window_causal_mask
    make = create_causal_mask if layer_window(module) is None else of_window
    return make(
        config=module.config,
        inputs_embeds=hidden_states,
        attention_mask=None,
        position_ids=position_ids,
        layer_idx=module.layer_idx,
        **as_cache(make, cache),
    )


def _brief(value: Any) -> str:
    return f"tensor{list(value.shape)}" if isinstance(value, torch.Tensor) else reprlib.repr(value)
