"""Saving what a cache holds, and going on from it in another process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetero_kv.adapter import bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.recurrent import state_shapes
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.repair import compute_anew
from hetero_kv.contexts.restoring import Shapes, restore
from hetero_kv.contexts.writing import Tokens, write_context
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.cache_maker import ModelState, injected
from hetero_kv.engine.errors import DamagedContextError


class Injected(Protocol):
    """What is asked of an injection: its model, and the operators in it."""

    model: Any

    @property
    def identity(self) -> Identity: ...

    def state(self) -> ModelState: ...
    def attention_operators(self) -> Any: ...


@dataclass(frozen=True)
class LoadedContext:
    """A context that goes on.

    Attributes:
        cache: as it was saved.
        tokens: ids of every row, as they were given; none where they were not.
        notes: as they were given.
        computed: tokens of each row that were computed anew, because the file is damaged.
    """

    cache: HeteroCache
    tokens: list[list[int]]
    notes: dict[str, Any]
    computed: int = 0


def save_context(
    path: str | Path, cache: HeteroCache, tokens: Tokens | None = None, notes: dict[str, Any] | None = None
) -> None:
    """Write all that a cache holds into one safetensors file; see `write_context`."""
    write_context(Path(path).expanduser(), cache, cache.injection.identity, tokens, notes)


def load_context(
    path: str | Path, model: Any, *, verify: bool = True, repair: bool = True, **settings: Any
) -> LoadedContext:
    """A cache that goes on from a saved context exactly as the one that was saved would have.

    Args:
        model: with the rules in it under which the context was saved.
        verify: whether every block is read once, to be checked; without, blocks are read when they are first attended
            to, and what is damaged in them is not seen.
        repair: whether what is damaged is computed anew where the context has its tokens; a warning names it. Without,
            it is an error.
        settings: as HeteroCache takes them beside the model.

    Raises:
        ContextError: there is no context, or it was saved with another model, other settings, or another version; the
            message says which, and what would fit.
        DamagedContextError: the file is not what was written.
        HeteroKVError: the model has no rules in it, or `max_seq_len` no room for the context.
    """
    with closing(OpenContext.at(Path(path).expanduser())) as context:
        injection: Injected = injected(model)  # type: ignore[assignment]
        context.identity.require(injection.identity, context.file.where)
        cache = HeteroCache(model, held=context.held(), **settings)
        cache.computed_under = (injection.state(),)
        computed = 0
        try:
            restore(cache, context, shapes_of(injection), verify=verify)
        except DamagedContextError as damage:
            if not repair or not context.tokens:
                raise
            computed = compute_anew(cache, context, damage)
        notes = context.said.get("notes")
        return LoadedContext(cache, context.tokens, notes if isinstance(notes, dict) else {}, computed)


def require_fit(path: str | Path, model: Any) -> None:
    """Raise where a saved context cannot go on in this model, as far as can be told before its weights are loaded.

    model: with the rules in it, its weights not there yet. Raises as `load_context`, of damage what the header has.
    """
    with closing(OpenContext.at(Path(path).expanduser())) as context:
        here = Identity.of(model, injected(model).attention_operators())  # type: ignore[attr-defined]
        context.identity.require(here, context.file.where, weights=False)


def shapes_of(injection: Injected) -> Shapes:
    """What the layers of a model with rules in it compute with."""
    config, model = bridge.text_config(injection.model), injection.model
    shapes = dict.fromkeys(range(config.num_hidden_layers), KVShape.of(config))
    operators: list[AttentionOperator] = list(injection.attention_operators())
    shapes |= {each.layer_idx: KVShape.of_attention(each.wrapped, config) for each in operators}
    return Shapes(shapes, model.dtype, model.device, state_shapes(model, config))
