"""Restricts a cache to one thread at a time: two threads would interleave their tokens."""

from __future__ import annotations

import threading

from hetero_kv.engine.errors import CacheInUseError


class ExclusiveUse:
    """A reentrant context for one thread at a time; any other thread is refused.

    Attributes:
        depth: how often the thread has entered and not left.

    Raises CacheInUseError, on entering, while another thread is inside.
    """

    __slots__ = ("_lock", "_thread", "depth")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread = 0
        self.depth = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            names = [each.name for each in threading.enumerate() if each.ident == self._thread]
            raise CacheInUseError(
                f"the cache is in use by another thread ({', '.join(names) or self._thread}); give each thread its "
                "own HeteroCache by HeteroCache(model) or cache.fork(), or wait until the other thread has finished"
            )
        self._thread = threading.get_ident()
        self.depth += 1

    def __exit__(self, *raised: object) -> None:
        self.depth -= 1
        self._lock.release()

    def leave_if_at(self, depth: int) -> None:
        """Leave if this thread is inside at `depth`: an interrupt has stopped it while it left."""
        if self.depth == depth and self._lock._is_owned():  # type: ignore[attr-defined]
            self.__exit__()

    @property
    def is_within(self) -> bool:
        """Whether this thread was the last one inside; it may have left."""
        return self._thread == threading.get_ident()
