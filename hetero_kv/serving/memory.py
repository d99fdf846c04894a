"""Plans the blocks of a store for requests: which of them fit, and which kept sequences are dropped first."""

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

#: A request is admitted only if it and every running one have blocks for this many more tokens. So each gets these
#: tokens before memory runs out and one of equal priority is preempted. A block or two: more would keep others waiting,
#: with fewer a sequence would be swapped out and in for little.
AHEAD = 32

#: A cache, and how many tokens it must be able to store.
Goal = tuple[HeteroCache, int]


class Memory:
    """The blocks of a store that requests share.

    A request is admitted with blocks for its tokens and `AHEAD` more, because few answers reach their longest length.
    If sequences cannot be written to the disk, it needs blocks for its longest answer.

    Args:
        store: the blocks of all requests.
        prefixes: the sequences of ended requests, which are dropped first.
        swaps: stores the sequences of preempted requests.
    """

    def __init__(self, store: Store, prefixes: ResidentPrefixes, swaps: SwapFolder) -> None:
        self._store, self._prefixes, self._swaps = store, prefixes, swaps

    def require_possible(self, request: Request, layouts: Iterable[Layout]) -> None:
        """Raise HeteroKVError unless the store has room for the request alone, with its longest answer."""
        tokens = self._store.tokens
        assert tokens is not None
        sizes = [layout.block_size for layout in layouts]
        missing = max((-(-request.max_stored_tokens // size) + -tokens // size for size in sizes), default=0)
        if missing > 0:
            raise HeteroKVError(
                f"the request needs {request.max_stored_tokens} tokens, and the store has {tokens}, which are "
                f"{missing} blocks too few; shorten the prompt or max_new_tokens, or give the engine more tokens "
                "(kv_tokens)"
            )

    def entering(self, request: Request, cache: HeteroCache) -> Goal:
        """The tokens a request needs blocks for, to be admitted with this cache or to stay when another one is."""
        if not self._swaps.is_usable:
            return cache, request.max_stored_tokens
        return cache, min(request.max_stored_tokens, len(request.tokens) + AHEAD)

    def fits(self, goals: Collection[Goal], without: Sequence[Request] = ()) -> bool:
        """Drop sequences of ended requests, the oldest first, until there are blocks for all goals; whether there are.

        Drops none if dropping all of them would not be enough.

        without: requests whose blocks count as free, because they can be preempted.
        """
        dropped = [request.cache for request in without if request.cache is not None]
        if self._missing(goals, dropped) <= 0:
            return True
        if self._missing(goals, [*dropped, *self._prefixes.caches]) > 0:
            return False
        while self._missing(goals, dropped) > 0:
            if not self._prefixes.drop_oldest():
                return False
        return True

    def _missing(self, goals: Collection[Goal], dropped: Sequence[HeteroCache]) -> int:
        """How many blocks are missing for the goals, in the layout that lacks most.

        dropped: caches whose blocks count as free.
        """
        layouts = [layout for cache, _ in goals for layout in cache.groups[0].layouts]
        most = 0
        for layout in dict.fromkeys(layouts):
            theirs = _references(dropped, layout)
            needed = sum(_more(cache, layout, tokens, theirs) for cache, tokens in goals)
            most = max(most, needed - self._store.free_blocks(layout) - self._freed(layout, theirs))
        return most

    def _freed(self, layout: Layout, dropped: Mapping[int, int]) -> int:
        """How many blocks become free when these references (block -> number) are dropped."""
        if not dropped:
            return 0
        blocks, counts = (np.fromiter(each, np.int64, len(dropped)) for each in (dropped.keys(), dropped.values()))
        return int((self._store.allocators[layout].references_of(blocks) == counts).sum())


def _more(cache: HeteroCache, layout: Layout, tokens: int, dropped: Mapping[int, int]) -> int:
    """How many more blocks a cache of one row needs to store `tokens` tokens.

    dropped: block -> how many references to it count as dropped.
    """
    size = layout.block_size
    needed = -(-tokens // size)
    for sequence in cache.sequences:
        table = sequence.tables[layout]
        # A partly filled shared block is copied.
        last = int(table.ids[-1]) if table.length % size else None
        is_copied = last is not None and table.allocator.references(last) - dropped.get(last, 0) > 1
        needed = max(0, needed - table.num_blocks) + bool(is_copied)
    return needed


def _references(caches: Iterable[HeteroCache], layout: Layout) -> dict[int, int]:
    """Block -> how many references these caches have to it."""
    tables = [sequence.tables[layout].ids for cache in caches for sequence in cache.sequences]
    if not tables:
        return {}
    blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
    return dict(zip(blocks.tolist(), counts.tolist(), strict=True))
