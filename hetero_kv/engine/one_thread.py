"""A cache is used by one thread at a time: a second one is refused, for both would store tokens between the other's."""

from __future__ import annotations

import threading

from hetero_kv.engine.errors import CacheInUseError


class OneThread:
    """A context that one thread at a time may be in, as often as it enters; any other is refused.

    Raises CacheInUseError, on entering, while another thread is within.
    """

    __slots__ = ("_lock", "_thread")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            names = [each.name for each in threading.enumerate() if each.ident == self._thread]
            raise CacheInUseError(
                f"the cache is in use by another thread ({', '.join(names) or self._thread}); give each thread a "
                "HeteroCache of its own, HeteroCache(model) or cache.fork(), or wait until the other one has finished"
            )
        self._thread = threading.get_ident()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    @property
    def is_within(self) -> bool:
        """Whether this thread is the one that was last within, and perhaps still is."""
        return self._thread == threading.get_ident()
