"""Saves a cache's KV as a context, and loads it in another process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.recurrent import state_shapes
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.repair import recompute
from hetero_kv.contexts.restoring import Shapes, restore
from hetero_kv.contexts.writing import Tokens, write_context
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.cache_factory import ModelState, injected
from hetero_kv.engine.errors import DamagedContextError


class Injected(Protocol):
    """The interface of an injection: its model, and the operators in it."""

    model: Any

    @property
    def identity(self) -> Identity: ...

    def state(self) -> ModelState: ...
    def attention_operators(self) -> Any: ...


@dataclass(frozen=True)
class LoadedContext:
    """A loaded context.

    Attributes:
        cache: the cache with the saved KV.
        tokens: the saved token ids of every row; [] if it was saved without them.
        notes: the saved notes.
        computed: tokens of each row that were recomputed because the file is damaged.
    """

    cache: HeteroCache
    tokens: list[list[int]]
    notes: dict[str, Any]
    computed: int = 0


def save_context(
    path: str | Path, cache: HeteroCache, tokens: Tokens | None = None, notes: dict[str, Any] | None = None
) -> None:
    """Write a cache's KV to one safetensors file; see `write_context`."""
    write_context(Path(path).expanduser(), cache, cache.injection.identity, tokens, notes)


def load_context(
    path: str | Path, model: Any, *, verify: bool = True, repair: bool = True, identity: Identity | None = None,
    first: int | None = None, **settings: Any,
) -> LoadedContext:  # fmt: skip
    """Load a saved context into a cache that continues exactly as the saved one would have.

    Args:
        model: the model, injected with the rules under which the context was saved.
        verify: whether to read and check every block; if not, a block is first read when it is attended to, and damage
            in it goes unnoticed.
        repair: whether to recompute damaged KV from the context's tokens, with a warning; if not, damage is an error.
        identity: that of the model now, where it is known; None computes it.
        first: as `restore` takes it.
        settings: further arguments of HeteroCache.

    Raises:
        ContextError: there is no context, or it was saved with another model, other settings, or another version; the
            message names the difference and the remedy.
        DamagedContextError: the file's content differs from what was written.
        HeteroKVError: the model has no rules injected, or the context exceeds `max_seq_len`.
    """
    with closing(OpenContext.at(Path(path).expanduser())) as context:
        injection: Injected = injected(model)  # type: ignore[assignment]
        context.identity.require(injection.identity if identity is None else identity, context.described)
        cache = HeteroCache(model, resident=context.resident_prefix(), **settings)
        cache.computed_under = (injection.state(),)
        computed = 0
        try:
            try:
                restore(cache, context, shapes_of(injection), verify=verify, first=first)
            except DamagedContextError as damage:
                if not repair or not context.tokens:
                    raise
                computed = recompute(cache, context, damage)
        except BaseException:
            # Blocks of a store that caches share are free again, although the error refers to this cache.
            cache.reset()
            raise
        notes = context.metadata.get("notes")
        return LoadedContext(cache, context.tokens, notes if isinstance(notes, dict) else {}, computed)


def require_fit(path: str | Path, model: Any) -> None:
    """Raise if a saved context does not fit this model, as far as that is known before its weights are loaded.

    model: the injected model, whose weights may be missing. Raises as `load_context`; it sees damage in the header
    only.
    """
    with closing(OpenContext.at(Path(path).expanduser())) as context:
        here = Identity.of(model, injected(model).attention_operators())  # type: ignore[attr-defined]
        context.identity.require(here, context.described, weights=False)


def shapes_of(injection: Injected) -> Shapes:
    """The shapes of an injected model's cache layers."""
    config, model = attention_module.text_config(injection.model), injection.model
    shapes = dict.fromkeys(range(config.num_hidden_layers), KVShape.of(config))
    operators: list[AttentionOperator] = list(injection.attention_operators())
    shapes |= {each.layer_idx: KVShape.of_attention(each.wrapped, config) for each in operators}
    return Shapes(shapes, model.dtype, model.device, state_shapes(model, config))
