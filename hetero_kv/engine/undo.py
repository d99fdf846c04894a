"""Rollback of a cache when something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from transformers.cache_utils import Cache

from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.interrupts import completed


def way_back(cache: Cache) -> Callable[[], None]:
    """A repeatable function that returns every layer to its present state.

    For a HeteroCache, and for transformers' dynamic caches.
    """
    if isinstance(cache, HeteroCache):
        return partial(cache.rollback, cache.snapshot())
    states = [(layer, hf_cache_layers.snapshot(layer)) for layer in cache.layers]

    def go_back() -> None:
        for layer, state in states:
            hf_cache_layers.rollback(layer, state)

    return go_back


@contextmanager
def undo_on_error(cache: Cache) -> Iterator[None]:
    """Within this context an exception, Ctrl-C included, rolls every layer back to its state before (`way_back`)."""
    go_back = way_back(cache)
    try:
        yield
    except BaseException:
        completed(go_back)
        raise
