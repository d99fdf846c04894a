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
    """The waiting requests, those that are being prefilled, and the running ones.

    Attributes:
        waiting: in the order in which they came.
        prefilling: those whose prompts are computed in part.
        running: those whose prompts are computed.
        computing: the one whose prompt's forward is paused, while others are answered: it cannot leave; else None.
        computed_prompts: how many prompts were computed so far.
        departures: how many requests have left the queues, which may have freed memory.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.computing: Request | None = None
        self.computed_prompts = 0
        self.departures = 0

    @property
    def all(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.running, *self.prefilling, *self.waiting]

    def by_state(self) -> list[tuple[State, Request]]:
        """All requests that have not ended, each with its state. Any thread may call it."""
        states: list[tuple[State, list[Request]]] = [
            ("answering", self.running), ("prefilling", self.prefilling), ("waiting", self.waiting)
        ]  # fmt: skip
        return [(state, each) for state, requests in states for each in list(requests)]

    def answer(self, request: Request) -> None:
        """Move a request whose prompt is computed to the running ones."""
        if request in self.prefilling:
            self.prefilling.remove(request)
            self.computed_prompts += 1
        self.running.append(request)

    def leave(self, request: Request) -> HeteroCache | None:
        """Remove a request; free its sequence on the disk and its drafter's memory. Returns its cache."""
        self.departures += 1
        for queue in (self.waiting, self.prefilling, self.running):
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
