"""DRAM that the caches of this process are to have and have not taken yet.

Pools take memory as they fill, so that what the system says is free does not show what is planned.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hetero_kv.engine.store import Store

#: Held from a plan until its store is registered: two threads must not be promised the same memory.
PLANNING = threading.RLock()

_live: weakref.WeakSet[Store] = weakref.WeakSet()


class Reserved(NamedTuple):
    """What other caches are to have.

    Attributes:
        size: DRAM that is planned for them and not taken, bytes.
        caches: that it is planned for.
        waiting: caches with `max_seq_len: auto` that have no tokens yet: each is to get an equal share of the rest.
        mapped: of `size`, bytes that take addresses already, in pools.
    """

    size: int = 0
    caches: int = 0
    waiting: int = 0
    mapped: int = 0


NOTHING_RESERVED = Reserved()


def register(store: Store) -> None:
    """Count what this store is to have for as long as it is there."""
    with PLANNING:
        _live.add(store)


def reserved_beside(own: Store | None) -> Reserved:
    """What the stores of this process are to have, without `own`."""
    with PLANNING:
        others = [store for store in _live if store is not own]
    sizes = [(size, store.rows > 0) for store in others if (size := store.outstanding)]
    mapped = sum(size for size, is_mapped in sizes if is_mapped)
    return Reserved(sum(size for size, _ in sizes), len(sizes), sum(store.waits for store in others), mapped)
