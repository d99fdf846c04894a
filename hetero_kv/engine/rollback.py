"""Rollback of a cache when something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from transformers.cache_utils import Cache

from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.interrupts import run_to_completion


def rollback_point(cache: Cache) -> Callable[[], None]:
    """A repeatable function that returns every layer to its present state; a joint cache to that before its forward.

    For a HeteroCache, and for transformers' dynamic caches.
    """
    if isinstance(cache, HeteroCache):
        return cache.go_back or partial(cache.rollback, cache.snapshot())
    states = [(layer, hf_cache_layers.snapshot(layer)) for layer in cache.layers]

    def go_back() -> None:
        for layer, state in states:
            hf_cache_layers.rollback(layer, state)

    return go_back


@contextmanager
def rollback_on_error(cache: Cache, go_back: Callable[[], None] | None = None) -> Iterator[None]:
    """Within this context an exception, Ctrl-C included, rolls every layer back to its state before.

    Args:
        go_back: the cache's `rollback_point`; None creates one.
    """
    go_back = go_back or rollback_point(cache)
    try:
        yield
    except BaseException:
        run_to_completion(go_back)
        raise


class CacheTransaction:
    """Within this context one thread uses a cache; an exception, Ctrl-C included, rolls every layer back.

    An interrupt on leaving rolls back too.

    Attributes:
        go_back: the cache's `rollback_point`, once inside.

    Raises CacheInUseError, on entering, while another thread uses the cache.
    """

    go_back: Callable[[], None]

    def __init__(self, cache: HeteroCache) -> None:
        self._cache = cache

    def __enter__(self) -> Self:
        in_use = self._cache.in_use
        in_use.__enter__()
        self._depth = in_use.depth
        try:
            self.go_back = rollback_point(self._cache)
        except BaseException:
            in_use.leave_if_at(self._depth)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        in_use = self._cache.in_use
        try:
            if error is not None:
                run_to_completion(self.go_back)
            in_use.__exit__()
        except BaseException:
            run_to_completion(self.go_back)
            in_use.leave_if_at(self._depth)
            raise
