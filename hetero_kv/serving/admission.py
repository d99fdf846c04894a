"""Who waits, who is being answered, and who is preempted where memory is short."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import HeteroKVError, brief_error
from hetero_kv.serving.memory import Goal, Memory
from hetero_kv.serving.request import Request
from hetero_kv.serving.swapped import SwapFolder

_logger = logging.getLogger(__name__)


class Admission:
    """Requests that wait, the one whose prompt passes, and those that are being answered.

    A request enters when there are blocks for its prompt and the next tokens of all (`Memory`). Where blocks run out,
    or a more urgent request waits for them, the least urgent one is preempted, among equals the one that came last: its
    sequence goes to the disk, and it waits before others of its priority.

    Args:
        memory: plans the blocks.
        swaps: where sequences of preempted requests go.

    Attributes:
        waiting: by priority, then preempted ones first, then in the order in which they came.
        prefilling: None while no prompt passes.
        running: those that have their prompt behind them.
    """

    def __init__(self, memory: Memory, swaps: SwapFolder) -> None:
        self._memory, self._swaps = memory, swaps
        self.waiting: list[Request] = []
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        # The request for which there is no memory until another one ends.
        self._blocked: Request | None = None

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.running, *([] if self.prefilling is None else [self.prefilling]), *self.waiting]

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request behind all others of its priority, or before them (`first`); 0 is more urgent than 1."""
        self.waiting.insert(0 if first else len(self.waiting), request)
        self.waiting.sort(key=lambda each: each.priority)

    # -- memory

    def _make_room(self, request: Request, cache: HeteroCache) -> bool:
        """Preempt less urgent requests until a request can enter with this cache; returns whether it can.

        None is preempted where that would not be enough.

        Raises HeteroKVError if the request never can, or nobody else is there who would free blocks.
        """
        self._memory.require_possible(request, cache.groups[0].layouts)
        while not self._memory.fits(self._entering(request, cache, self.running)):
            if not self.running:
                raise HeteroKVError(
                    "the store has too few free blocks for the request, and no other one has them; reset other caches "
                    "in the store, or give the engine more tokens (kv_tokens)"
                )
            less_urgent = [each for each in self.running if each.priority > request.priority]
            others = [each for each in self.running if each not in less_urgent]
            is_enough = self._memory.fits(self._entering(request, cache, others), without=less_urgent)
            if not less_urgent or not is_enough or not self._preempt(max(less_urgent, key=_urgency)):
                return False
        return True

    def _entering(self, request: Request, cache: HeteroCache, others: Sequence[Request]) -> list[Goal]:
        return [self._memory.entering(request, cache), *(self._memory.entering(*each) for each in with_caches(others))]

    def _rows(self) -> list[Request]:
        """The running requests that have blocks for another token; until all have, the least urgent is preempted."""
        try:
            while not self._memory.fits(self._next(self.running)):
                if not self._preempt(self._least_urgent()):
                    return self._rows_with_blocks()
        except Exception as error:
            _logger.warning("blocks were not counted (%s); whoever has none for a token fails", brief_error(error))
        return list(self.running)

    def _next(self, rows: Sequence[Request]) -> list[Goal]:
        """Another token of every row, and the prompt that passes."""
        goals = [(cache, request.stored + 1) for request, cache in with_caches(rows)]
        passing = [] if self.prefilling is None else [self.prefilling]
        return goals + [(cache, request.prompt_tokens) for request, cache in with_caches(passing)]

    def _least_urgent(self) -> Request:
        """Whose blocks are taken: the request that came last among the least urgent ones.

        A prompt that passes would begin again, so that its request counts only where it is less urgent than all others.
        """
        last = max(self.running, key=_urgency)
        return self.prefilling if self.prefilling is not None and self.prefilling.priority > last.priority else last

    def _preempt(self, request: Request) -> bool:
        """Take the blocks of a request, which waits on the disk until there is memory; returns whether it worked."""
        cache = request.cache
        assert cache is not None
        if request is self.prefilling:
            self.prefilling, request.cached_tokens = None, 0
        else:
            request.swapped = self._swaps.put(cache)
            if request.swapped is None:
                return False
            self.running.remove(request)
        request.cache = None
        self.add(request, first=True)
        free(cache)
        return True

    def _rows_with_blocks(self) -> list[Request]:
        """The running requests that have blocks for another token, where none can be preempted; the others wait.

        Where nobody could go on, the disk is tried again, and the least urgent request fails if that is in vain.
        """
        rows: list[Request] = []
        for request in sorted(self.running, key=_urgency):
            if self._memory.fits(self._next([*rows, request])):
                rows.append(request)
        if not rows and self.prefilling is None:
            last, self._swaps.error = self._least_urgent(), None
            if not self._preempt(last):
                self._fail(last, self._swaps.failure())
        return rows

    # -- ends

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, and free its blocks."""
        cache = self._leave(request)
        request.stream.fail(error)
        if cache is not None:
            free(cache)

    def _leave(self, request: Request) -> HeteroCache | None:
        """Forget a request, and remove its sequence from the disk. Returns its cache."""
        # Where the disk was full, it is tried again.
        self._blocked = self._swaps.error = None
        if self.prefilling is request:
            self.prefilling = None
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.drop_swapped()
        cache, request.cache = request.cache, None
        return cache


def _urgency(request: Request) -> tuple[int, float]:
    """What requests are ordered by, the most urgent first."""
    return request.priority, request.began


def free(cache: HeteroCache) -> None:
    """Free a cache's blocks. After an error they are free once nothing refers to the cache."""
    try:
        cache.reset()
    except Exception as error:
        _logger.warning("the blocks of a request were not freed at once (%s)", brief_error(error))


def with_caches(requests: Iterable[Request]) -> list[tuple[Request, HeteroCache]]:
    """Those of the requests that have a cache, each with it."""
    return [(request, request.cache) for request in requests if request.cache is not None]
