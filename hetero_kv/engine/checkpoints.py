"""Taking the layers of a cache back to where they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, CacheLayerMixin

from hetero_kv.engine.operator_layer import OperatorLayer
from hetero_kv.engine.sequence_layer import SequenceLayer

if TYPE_CHECKING:
    from hetero_kv.engine.cache import HeteroCache


@contextmanager
def undo_on_error(cache: Cache) -> Iterator[None]:
    """Within this context an exception, Ctrl-C included, takes every layer back to where it was before."""
    before = [_checkpoint(layer) for layer in cache.layers]
    try:
        yield
    except BaseException:
        for layer, state in zip(cache.layers, before, strict=True):
            _restore(layer, state)
        raise


@contextmanager
def transient(cache: HeteroCache, lasting: Iterable[CacheLayerMixin]) -> Iterator[None]:
    """Within this context nothing that is stored lasts, but in the layers `lasting`, and no progress is told.

    Layers that keep the whole sequence store nothing: what passes needs no room in them.
    """
    held = {id(layer) for layer in lasting}
    before = [(layer, _checkpoint(layer)) for layer in cache.layers if id(layer) not in held]
    sequences = [layer for layer in cache.layers if isinstance(layer, SequenceLayer)]
    on_progress = cache.on_progress
    try:
        cache.on_progress = None
        for sequence in sequences:
            sequence.keeps = False
        yield
    finally:
        cache.on_progress = on_progress
        for sequence in sequences:
            sequence.keeps = True
        for layer, state in before:
            _restore(layer, state)


def _checkpoint(layer: CacheLayerMixin) -> Any:
    if isinstance(layer, OperatorLayer):
        return layer.checkpoint()
    # transformers' own dynamic layers grow by concatenation, so that the old tensors stay valid.
    return {
        name: layer.__dict__[name]
        for name in ("keys", "values", "is_initialized", "cumulative_length")
        if name in layer.__dict__
    }


def _restore(layer: CacheLayerMixin, state: Any) -> None:
    if isinstance(layer, OperatorLayer):
        layer.restore(state)
    else:
        layer.__dict__.update(state)
