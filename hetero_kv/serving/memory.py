"""Plans the blocks of a store among requests: who fits, and whose blocks are taken first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.sequence import Layout
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.request import Request
from hetero_kv.serving.swapped import SwapFolder

#: A request enters only if it and every running one have blocks for this many tokens more. So each of them gets these
#: tokens before memory runs out and one of equal priority is preempted. They are a block or two: more would keep others
#: waiting, and with fewer a sequence would go to the disk and back for little.
AHEAD = 32

#: A cache, and how many tokens it shall be able to store.
Goal = tuple[HeteroCache, int]


class Memory:
    """The blocks of a store that requests share.

    A request enters with blocks for its tokens and `AHEAD` more, because few answers are as long as they may be.
    Where sequences cannot be written to the disk, it enters with blocks for its longest answer.

    Args:
        store: the blocks of all requests.
        prefixes: the sequences of ended requests, which are dropped first.
        swaps: where sequences of preempted requests go.
    """

    def __init__(self, store: Store, prefixes: ResidentPrefixes, swaps: SwapFolder) -> None:
        self._store, self._prefixes, self._swaps = store, prefixes, swaps

    def require_possible(self, request: Request, layouts: Iterable[Layout]) -> None:
        """Raise HeteroKVError unless the store has room for the request alone, with its longest answer."""
        tokens = self._store.tokens
        assert tokens is not None
        sizes = [layout.block_size for layout in layouts]
        missing = max((-(-request.most_stored // size) + -tokens // size for size in sizes), default=0)
        if missing > 0:
            raise HeteroKVError(
                f"the request needs {request.most_stored} tokens, and the store has {tokens}, which are {missing} "
                "blocks too few; shorten the prompt or max_new_tokens, or give the engine more tokens (kv_tokens)"
            )

    def entering(self, request: Request, cache: HeteroCache) -> Goal:
        """What a request needs to enter with this cache, or to stay when another one enters."""
        if not self._swaps.is_usable:
            return cache, request.most_stored
        return cache, min(request.most_stored, len(request.tokens) + AHEAD)

    def fits(self, goals: Collection[Goal], without: Sequence[Request] = ()) -> bool:
        """Whether there are blocks for all goals, once sequences of ended requests are dropped, the oldest first.

        None is dropped where dropping all of them would not be enough.

        without: requests whose blocks count as free, because they can be preempted.
        """
        gone = [request.cache for request in without if request.cache is not None]
        if self._missing(goals, gone) <= 0:
            return True
        if self._missing(goals, [*gone, *self._prefixes.caches]) > 0:
            return False
        while self._missing(goals, gone) > 0:
            if not self._prefixes.drop_oldest():
                return False
        return True

    def _missing(self, goals: Collection[Goal], gone: Sequence[HeteroCache]) -> int:
        """How many blocks too few are free for the goals, in the layout that lacks most.

        gone: caches whose blocks count as free.
        """
        layouts = [layout for cache, _ in goals for layout in cache.groups[0].layouts]
        most = 0
        for layout in dict.fromkeys(layouts):
            theirs = _references(gone, layout)
            needed = sum(_more(cache, layout, tokens, theirs) for cache, tokens in goals)
            most = max(most, needed - self._store.free_blocks(layout) - self._freed(layout, theirs))
        return most

    def _freed(self, layout: Layout, gone: Mapping[int, int]) -> int:
        """How many blocks are free once so many references to each (block -> number) are dropped."""
        if not gone:
            return 0
        blocks, counts = (np.fromiter(each, np.int64, len(gone)) for each in (gone.keys(), gone.values()))
        return int((self._store.allocators[layout].references_of(blocks) == counts).sum())


def _more(cache: HeteroCache, layout: Layout, tokens: int, gone: Mapping[int, int]) -> int:
    """How many blocks a cache of one row takes until it stores so many tokens.

    gone: block -> how many references to it count as dropped.
    """
    size = layout.block_size
    needed = -(-tokens // size)
    for sequence in cache.sequences:
        table = sequence.tables[layout]
        # A partly filled block that others have too is copied.
        last = int(table.ids[-1]) if table.length % size else None
        is_copied = last is not None and table.allocator.references(last) - gone.get(last, 0) > 1
        needed = max(0, needed - table.num_blocks) + bool(is_copied)
    return needed


def _references(caches: Iterable[HeteroCache], layout: Layout) -> dict[int, int]:
    """Block -> how many references these caches have to it."""
    tables = [sequence.tables[layout].ids for cache in caches for sequence in cache.sequences]
    if not tables:
        return {}
    blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
    return dict(zip(blocks.tolist(), counts.tolist(), strict=True))
