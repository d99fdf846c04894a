"""The requests of an engine that have not ended, by what they wait for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import brief_error
from hetero_kv.serving.request import Request

_logger = logging.getLogger(__name__)


class Queues:
    """Requests that wait, the one whose prompt passes, and those that are being answered.

    Attributes:
        waiting: by priority, then preempted ones first, then in the order in which they came.
        prefilling: None while no prompt passes.
        running: those that have their prompt behind them.
        departures: how many requests have left, which may have freed memory.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        self.departures = 0

    @property
    def all(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.running, *([] if self.prefilling is None else [self.prefilling]), *self.waiting]

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request behind all others of its priority, or before them (`first`); 0 is more urgent than 1."""
        self.waiting.insert(0 if first else len(self.waiting), request)
        self.waiting.sort(key=lambda each: each.priority)

    def answer(self, request: Request) -> None:
        """Let a request, which has its prompt behind it, get tokens."""
        if request is self.prefilling:
            self.prefilling = None
        self.running.append(request)

    def leave(self, request: Request) -> HeteroCache | None:
        """Forget a request, with its sequence on the disk and its drafter's memory. Returns its cache."""
        self.departures += 1
        if self.prefilling is request:
            self.prefilling = None
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.drop_swapped()
        request.release_drafter()
        cache, request.cache = request.cache, None
        return cache

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, and free its blocks."""
        cache = self.leave(request)
        request.stream.fail(error)
        if cache is not None:
            free(cache)


def free(cache: HeteroCache) -> None:
    """Free a cache's blocks. After an error they are free once nothing refers to the cache."""
    try:
        cache.reset()
    except Exception as error:
        _logger.warning("the blocks of a request were not freed at once (%s)", brief_error(error))


def with_caches(requests: Iterable[Request]) -> list[tuple[Request, HeteroCache]]:
    """Those of the requests that have a cache, each with it."""
    return [(request, request.cache) for request in requests if request.cache is not None]
