"""Admission and preemption of requests by the blocks that are free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import HeteroKVError, brief_error
from hetero_kv.serving.checkpoints import Checkpoints, KeptCheckpoint
from hetero_kv.serving.memory import Goal, Memory
from hetero_kv.serving.prefixes import ResidentPrefixes, sequences_of
from hetero_kv.serving.prompt_order import PromptOrder
from hetero_kv.serving.queues import Queues, free, with_caches
from hetero_kv.serving.request import Request
from hetero_kv.serving.reuse import Reuse
from hetero_kv.serving.swapped import SwapFolder

_logger = logging.getLogger(__name__)


class Admission:
    """Admits requests while blocks are free, and preempts the least urgent one when they run out.

    A request is admitted when there are blocks for its prompt and for the next tokens of every request (`Memory`). When
    blocks run out, or a more urgent request needs them, the least urgent request is preempted, among equals the newest.
    Its sequence is written to the disk, and it continues ahead of later requests of its priority.

    Args:
        queues: the requests.
        memory: plans the blocks.
        swaps: stores the sequences of preempted requests.
        prefixes: sequences whose prefixes prompts can reuse.
        order: of the prompts.
        new_cache: creates an empty cache in the store.
        checkpoints: of requests whose layers do not keep every token.
        max_batch: the most requests that are answered at a time.
    """

    def __init__(
        self, queues: Queues, memory: Memory, swaps: SwapFolder, prefixes: ResidentPrefixes,
        order: PromptOrder, new_cache: Callable[[], HeteroCache], checkpoints: Checkpoints, max_batch: int,
    ) -> None:  # fmt: skip
        self._queues, self._memory, self._swaps, self._prefixes = queues, memory, swaps, prefixes
        self._order = order
        self._new_cache, self._checkpoints, self._max_batch = new_cache, checkpoints, max_batch
        # The request that found no memory, the number of departures at that moment, and the prompt that paused.
        self._blocked: tuple[Request, int, Request | None] | None = None
        self._departures = 0

    # -- admission

    def admit(self) -> None:
        """Admit the waiting requests that come next, while there are rows and memory."""
        while self._admit_next():
            pass

    def _admit_next(self) -> bool:
        """Admit the next waiting request, or fail it; returns whether another one may follow."""
        queues = self._queues
        if queues.departures != self._departures:
            # Try the disk again if it was full.
            self._departures, self._swaps.error = queues.departures, None
        if len(queues.running) + len(queues.prefilling) >= self._max_batch:
            return False
        request = self._order.first_waiting()
        if request is None or self._blocked == (request, queues.departures, queues.computing):
            return False
        cache = None
        try:
            cache, reuse, checkpoints = self._begun_cache(request)
            if not self._make_room(request, cache):
                free(cache)
                self._blocked = request, queues.departures, queues.computing
                return False
            if request.swapped is not None:
                request.swapped.restore(cache)
        except Exception as error:
            if cache is not None:
                free(cache)
            queues.fail(request, error)
            return True
        queues.waiting.remove(request)
        request.cache = cache
        if request.swapped is None:
            request.begin(reuse, checkpoints)
            self._checkpoints.use(checkpoints)
            queues.prefilling.append(request)
        else:
            request.drop_swapped()
            queues.answer(request)
        return True

    def _begun_cache(self, request: Request) -> tuple[HeteroCache, Reuse, tuple[KeptCheckpoint, ...]]:
        """A cache with the longest known prefix of a prompt, what is reused, and the checkpoints within the prefix."""
        if request.swapped is not None:
            return self._new_cache(), request.reuse, ()
        if not request.reuses:
            return self._new_cache(), Reuse(reason="off"), ()
        live = sequences_of(self._queues.running)
        prefix = self._prefixes.find(request.tokens, live, request.tenant, partial(self._reusable, request))
        resident = self._new_cache() if prefix.cache is None else prefix.cache
        try:
            cache, reuse = self._loaded_cache(request, resident, prefix.reuse)
        except BaseException:
            free(resident)
            raise
        return cache, reuse, prefix.checkpoints if cache is resident else ()

    def _loaded_cache(self, request: Request, resident: HeteroCache, reuse: Reuse) -> tuple[HeteroCache, Reuse]:
        """A cache with a prefix from the disk, if it is a block longer than the resident prefix, and fits."""
        stored, cached = self._prefixes.stored, reuse.tokens
        most = self._reusable(request, len(request.tokens) - 1)
        # A stored sequence has all but the last of these tokens at most.
        begun = request.tokens[: most + 1]
        found = None if stored is None else stored.longest(begun, cached + stored.min_tokens, request.tenant)
        if request.is_store_away and reuse.reason != "all":
            reuse = replace(reuse, reason="store_away")
        if stored is None or found is None:
            return resident, reuse
        context, tokens = found
        missed = replace(reuse, reason="not_loaded", common=max(tokens, reuse.common))
        if not stored.has_here(context, tokens):
            return resident, reuse if request.is_store_away else missed
        empty = self._new_cache()
        (_, needed), *others = self._entering(request, empty, self._admitted)
        if not self._memory.fits([(empty, max(needed, context.tokens)), *others]):
            return resident, missed
        loaded = stored.load(context, tokens, resident.tokenizer)
        if loaded is None:
            return resident, missed
        free(resident)
        if tokens == most < len(request.tokens) - 1:
            return loaded, Reuse(tokens, "chooses", max(tokens, reuse.common), "disk")
        return loaded, _from_disk(reuse, tokens, context.tokens, len(request.tokens))

    def _reusable(self, request: Request, common: int) -> int:
        """How many of the `common` first tokens of a request can be reused."""
        return request.reusable(common, self._prefixes.choosing_queries)

    def _make_room(self, request: Request, cache: HeteroCache) -> bool:
        """Preempt less urgent requests until a request can be admitted with this cache; returns whether it can.

        Preempts none if preempting all of them would free too few blocks.

        Raises HeteroKVError if the request can never be admitted, or no other request will free blocks.
        """
        self._memory.require_possible(request, cache.groups[0].layouts)
        while not self._memory.fits(self._entering(request, cache, admitted := self._admitted)):
            if not admitted:
                raise HeteroKVError(
                    "the store has too few free blocks for the request, and no other one has them; reset other caches "
                    "in the store, or give the engine more tokens (kv_tokens)"
                )
            less_urgent = [each for each in self._preemptible if each.priority > request.priority]
            others = [each for each in admitted if each not in less_urgent]
            is_enough = self._memory.fits(self._entering(request, cache, others), without=less_urgent)
            if not less_urgent or not is_enough or not self.preempt(max(less_urgent, key=_urgency)):
                return False
        return True

    @property
    def _admitted(self) -> list[Request]:
        return [*self._queues.running, *self._queues.prefilling]

    @property
    def _preemptible(self) -> list[Request]:
        return [each for each in self._admitted if each is not self._queues.computing]

    def _entering(self, request: Request, cache: HeteroCache, others: Sequence[Request]) -> list[Goal]:
        return [self._memory.entering(request, cache), *(self._memory.entering(*each) for each in with_caches(others))]

    # -- preemption

    def rows(self) -> list[Request]:
        """The running requests that have blocks for another token; until all have, the least urgent is preempted."""
        try:
            while not self._memory.fits(self._next(self._queues.running)):
                if not self.preempt(self._least_urgent()):
                    return self._rows_with_blocks()
        except Exception as error:
            _logger.warning("blocks were not counted (%s); whoever has none for a token fails", brief_error(error))
        return list(self._queues.running)

    def has_room(self, rows: Sequence[Request], guesses: Sequence[int]) -> bool:
        """Whether there are blocks for each row's next token and so many guesses, besides the prompts in progress.

        Drops sequences of ended requests for them, but preempts no request.
        """
        return self._memory.fits(self._next(rows, guesses))

    def _next(self, rows: Sequence[Request], guesses: Sequence[int] | None = None) -> list[Goal]:
        """The blocks for another token of every row and its guesses, and for the prompts in progress."""
        counts = guesses or [0] * len(rows)
        goals = [
            (cache, request.stored + 1 + count)
            for (request, cache), count in zip(with_caches(rows), counts, strict=True)
        ]
        return goals + [(cache, len(request.tokens)) for request, cache in with_caches(self._queues.prefilling)]

    def _least_urgent(self) -> Request:
        """The request to preempt: the newest among the least urgent ones.

        A prompt in progress would have to start again, so its request is chosen only if it is less urgent than all
        others.
        """
        last = max(self._queues.running, key=_urgency)
        passing = max(
            (each for each in self._preemptible if each not in self._queues.running), key=_urgency, default=last
        )
        return passing if passing.priority > last.priority else last

    def preempt(self, request: Request) -> bool:
        """Write a request's sequence to the disk and free its blocks; returns whether that succeeded."""
        queues, cache = self._queues, request.cache
        assert cache is not None
        if request in queues.prefilling:
            queues.prefilling.remove(request)
            request.begin_again()
        else:
            request.swapped = self._swaps.put(cache)
            if request.swapped is None:
                return False
            queues.running.remove(request)
        request.cache = None
        request.release_drafter()
        queues.waiting.append(request)
        free(cache)
        return True

    def _rows_with_blocks(self) -> list[Request]:
        """The running requests that have blocks for another token, when none can be preempted; the others wait.

        If no request could continue, tries the disk again; if that fails too, the least urgent request fails.
        """
        rows: list[Request] = []
        for request in sorted(self._queues.running, key=_urgency):
            if self._memory.fits(self._next([*rows, request])):
                rows.append(request)
        if not rows and not self._queues.prefilling:
            last, self._swaps.error = self._least_urgent(), None
            if not self.preempt(last):
                self._queues.fail(last, self._swaps.failure())
        return rows


def _from_disk(resident: Reuse, tokens: int, stored: int, prompt: int) -> Reuse:
    """The reuse of `tokens` tokens of a stored context, when fewer were resident."""
    if tokens == prompt - 1:
        return Reuse(tokens, "all", tokens, "disk")
    if resident.common > tokens:
        return replace(resident, tokens=tokens, source="disk")
    return Reuse(tokens, "extends" if tokens == stored else "differs", tokens, "disk")


def _urgency(request: Request) -> tuple[int, float]:
    """The sort key of requests, the most urgent first."""
    return request.priority, request.began
