"""Several caches of one model as one, for a forward of one new token of each row."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import ExitStack, contextmanager

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.exclusive_use import ExclusiveUse
from hetero_kv.engine.padding_mask import PaddingMask
from hetero_kv.errors import HeteroKVError


@contextmanager
def joined(caches: Rows[HeteroCache]) -> Iterator[HeteroCache]:
    """Within this context one cache has the rows of all `caches`, in their order, for one token more of each row.

    Each cache keeps its own blocks and layers. After an exception all of them are what they were before.

    Raises HeteroKVError for caches of several models or depths, or without tokens, and CacheInUseError when another
    thread uses one of them.
    """
    first = caches[0]
    for cache in caches:
        if cache.injection is not first.injection or cache.depth != first.depth:
            raise HeteroKVError("only caches of one injected model, with tokens of equal depth, compute together")
        if not cache.columns.count:
            raise HeteroKVError("a cache without tokens cannot decode; prefill a prompt into it first")
    joint: HeteroCache = object.__new__(HeteroCache)
    joint.__dict__.update(first.__dict__)
    joint.in_use, joint.on_progress, joint.columns = ExclusiveUse(), None, PaddingMask()
    joint.mapped_files = tuple({id(file): file for cache in caches for file in cache.mapped_files}.values())
    joint._set_groups([group for cache in caches for group in cache.groups])
    with ExitStack() as used:
        for cache in caches:
            used.enter_context(cache.in_use)
        yield joint
        for cache in caches:
            cache.columns = cache.columns.grown(1, [1] * len(cache.sequences))
