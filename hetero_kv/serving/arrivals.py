"""Requests that wait for a stored beginning from another machine, beside those that are computed."""

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
    """Fetches stored beginnings of requests, several at a time; each request then goes on, in any order.

    Args:
        prefixes: where beginnings are looked up.
        arrive: takes a request that goes on, from any thread.
    """

    def __init__(self, prefixes: ResidentPrefixes, arrive: Callable[[Request], None]) -> None:
        self._prefixes, self._arrive = prefixes, arrive
        self._lock = Lock()
        self._waiting: list[Request] = []
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hetero-kv arrivals")

    @property
    def waiting(self) -> list[Request]:
        """The requests that wait."""
        return list(self._waiting)

    def add(self, request: Request) -> None:
        """Let a request go on once its stored beginning is here, or is known not to come."""
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
        # Layers that cannot go back may not use what is alike.
        known = self._prefixes.common(request.tokens, request.tenant) if stored.goes_back else 0
        is_late = time.perf_counter() - request.began > stored.wait_s
        request.is_store_away = is_late or not stored.fetch(request.tokens, known + stored.least, request.tenant)
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        with self._lock:
            if request not in self._waiting:
                return
            self._waiting.remove(request)
        self._arrive(request)

    def cancel(self, stream: ResultStream[object]) -> None:
        """Let the request of a cancelled stream go on at once, if it waits."""
        for request in self.waiting:
            if request.stream is stream:
                self._go_on(request)

    def close(self) -> None:
        """Let all requests go on at once; no further ones may come."""
        for request in self.waiting:
            self._go_on(request)
        self._threads.shutdown(cancel_futures=True)
