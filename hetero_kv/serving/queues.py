"""The queues of an engine: waiting, prefilling and running requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import brief_error
from hetero_kv.serving.request import Request
from hetero_kv.serving.status import State

_logger = logging.getLogger(__name__)


class Queues:
    """The waiting requests, the one that is being prefilled, and the running ones.

    Attributes:
        waiting: by priority, then preempted ones first, then in the order in which they came.
        prefilling: None while no prompt is being computed.
        running: those whose prompt is computed.
        departures: how many requests have left the queues, which may have freed memory.
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

    def by_state(self) -> list[tuple[State, Request]]:
        """All requests that have not ended, each with its state. Any thread may call it."""
        passing = self.prefilling
        answering: list[tuple[State, Request]] = [("answering", each) for each in list(self.running)]
        prefilling: list[tuple[State, Request]] = [] if passing is None else [("prefilling", passing)]
        return answering + prefilling + [("waiting", each) for each in list(self.waiting)]

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request after all others of its priority, or before them (`first`); 0 is more urgent than 1."""
        waiting = [request, *self.waiting] if first else [*self.waiting, request]
        # In a new list: one that is being sorted is empty for other threads.
        self.waiting = sorted(waiting, key=lambda each: each.priority)

    def answer(self, request: Request) -> None:
        """Move a request whose prompt is computed to the running ones."""
        if request is self.prefilling:
            self.prefilling = None
        self.running.append(request)

    def leave(self, request: Request) -> HeteroCache | None:
        """Remove a request; free its sequence on the disk and its drafter's memory. Returns its cache."""
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
    """Free a cache's blocks. After an error they become free when nothing refers to the cache."""
    try:
        cache.reset()
    except Exception as error:
        _logger.warning("the blocks of a request were not freed at once (%s)", brief_error(error))


def with_caches(requests: Iterable[Request]) -> list[tuple[Request, HeteroCache]]:
    """The requests that have a cache, each with its cache."""
    return [(request, request.cache) for request in requests if request.cache is not None]
