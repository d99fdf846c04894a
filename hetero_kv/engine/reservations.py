"""DRAM that the caches of this process have reserved and not yet allocated.

Pools allocate memory as they fill, so the system's free memory still includes reserved memory.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hetero_kv.engine.store import Store

#: Locked from a plan until its store is registered: two threads must not reserve the same memory.
PLANNING = threading.RLock()

_live: weakref.WeakSet[Store] = weakref.WeakSet()


class Reserved(NamedTuple):
    """The reservations of other caches.

    Attributes:
        size: DRAM that is reserved and not allocated, bytes.
        caches: number of caches with a reservation.
        waiting: caches with `max_seq_len: auto` and no tokens yet: each will get an equal share of the rest.
        mapped: part of `size` whose addresses pools have mapped already, bytes.
        planned: DRAM of their stores when full, allocated or not, bytes; excludes waiting caches.
        budget: the smallest of their budgets (`Store.budget`), bytes; None if none has one.
    """

    size: int = 0
    caches: int = 0
    waiting: int = 0
    mapped: int = 0
    planned: int = 0
    budget: int | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether other caches have reserved nothing, and none waits for its share."""
        return not (self.size or self.waiting)


NOTHING_RESERVED = Reserved()


def register(store: Store) -> None:
    """Count the reservation of this store for its lifetime."""
    with PLANNING:
        _live.add(store)


def reserved_by_others(own: Store | None) -> Reserved:
    """The reservations of the stores of this process, without `own`."""
    with PLANNING:
        others = [store for store in _live if store is not own]
    sizes = [(size, store.rows > 0) for store in others if (size := store.outstanding)]
    mapped = sum(size for size, is_mapped in sizes if is_mapped)
    planned = sum(store.planned for store in others if not store.waits)
    budget = min((store.budget for store in others if store.budget is not None), default=None)
    waiting = sum(store.waits for store in others)
    return Reserved(sum(size for size, _ in sizes), len(sizes), waiting, mapped, planned, budget)
