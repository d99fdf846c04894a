"""Taking a cache back to where it was when something fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.cache_utils import Cache

from hetero_kv.engine import untouched
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.interrupts import completed


@contextmanager
def undo_on_error(cache: Cache) -> Iterator[None]:
    """Within this context an exception, Ctrl-C included, takes every layer back to where it was before.

    For a HeteroCache, and for transformers' own dynamic caches.
    """
    if isinstance(cache, HeteroCache):
        before = cache.snapshot()
        try:
            yield
        except BaseException:
            completed(lambda: cache.rollback(before))
            raise
        return
    states = [untouched.snapshot(layer) for layer in cache.layers]
    try:
        yield
    except BaseException:
        for layer, state in zip(cache.layers, states, strict=True):
            untouched.rollback(layer, state)
        raise
