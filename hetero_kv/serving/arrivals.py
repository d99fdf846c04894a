"""Requests that wait for a stored prefix from another machine, while others are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.request import Request
from hetero_kv.serving.stream import ResultStream

_AT_ONCE = 8


class Arrivals:
    """Fetches stored prefixes of requests, several at a time; each request then continues, in any order.

    Args:
        prefixes: finds known prefixes.
        arrive: receives a request that continues; called from any thread.
    """

    def __init__(self, prefixes: ResidentPrefixes, arrive: Callable[[Request], None]) -> None:
        self._prefixes, self._arrive = prefixes, arrive
        self._lock = Lock()
        self._waiting: list[Request] = []
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hetero-kv arrivals")

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests."""
        return list(self._waiting)

    def add(self, request: Request) -> None:
        """Let a request continue once its stored prefix has arrived, or cannot arrive."""
        stored = self._prefixes.stored
        if stored is None or not stored.is_remote or not request.reuses:
            self._arrive(request)
            return
        with self._lock:
            self._waiting.append(request)
        self._threads.submit(self._fetch, request)

    def _fetch(self, request: Request) -> None:
        stored = self._prefixes.stored
        assert stored is not None
        if request not in self._waiting:
            return
        # Layers that cannot roll back may be unable to reuse the common prefix.
        known = self._prefixes.common(request.tokens, request.tenant) if stored.can_roll_back else 0
        is_late = time.perf_counter() - request.began > stored.wait_s
        request.is_store_away = is_late or not stored.fetch(request.tokens, known + stored.min_tokens, request.tenant)
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        with self._lock:
            if request not in self._waiting:
                return
            self._waiting.remove(request)
        self._arrive(request)

    def cancel(self, stream: ResultStream[object]) -> None:
        """Let the request of a cancelled stream continue at once, if it waits."""
        for request in self.waiting:
            if request.stream is stream:
                self._go_on(request)

    def close(self) -> None:
        """Let all requests continue at once; no further ones may be added."""
        for request in self.waiting:
            self._go_on(request)
        self._threads.shutdown(cancel_futures=True)
