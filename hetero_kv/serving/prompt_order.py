"""The order in which prompts are computed: short ones overtake long ones, which wait for a bounded time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hetero_kv.serving.prefixes import ResidentPrefixes, sequences_of
from hetero_kv.serving.prompt_speed import PromptSpeed
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request

# Tokens of prompts per second, before the first one was measured.
_ASSUMED = 300.0


class PromptOrder:
    """Orders requests by when each prompt would be computed if it were the only one.

    So a short prompt, and a question about a document whose KV is known, overtake a long prompt between two of its
    parts. The long one waits only for prompts that arrive within the time that it takes alone.

    Args:
        queues: the requests.
        prefixes: the prefixes that need not be computed again.
        speed: of prompts.
    """

    def __init__(self, queues: Queues, prefixes: ResidentPrefixes, speed: PromptSpeed) -> None:
        self._queues, self._prefixes, self._speed = queues, prefixes, speed
        # Of waiting requests: the number of prompts that were computed at the estimate, and the known tokens.
        self._known: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()

    def first_waiting(self) -> Request | None:
        """The waiting request to admit next; None if there is none, or prompts in progress come before all of them."""
        waiting, passing = self._queues.waiting, self._queues.prefilling
        if len(waiting) + len(passing) < 2:
            return waiting[0] if waiting else None
        self._estimate()
        first = min(waiting, key=self._due, default=None)
        if first is None or any(self._due(each) <= self._due(first) for each in passing):
            return None
        return first

    def first_passing(self) -> Request | None:
        """The request in progress whose prompt is computed next."""
        return min(self._queues.prefilling, key=self._due, default=None)

    def _due(self, request: Request) -> tuple[int, float]:
        """A request's priority, and when its prompt would be computed alone, seconds of `time.perf_counter`."""
        if request.swapped is not None:
            return request.priority, request.began
        known = self._known[request][1] if request.cache is None else request.reuse.tokens
        missing = len(request.tokens) - known
        return request.priority, request.began + missing / (self._speed.tokens_per_s or _ASSUMED)

    def _estimate(self) -> None:
        """Look up the known tokens of waiting requests, again after every computed prompt, which others may share."""
        computed = self._queues.computed_prompts
        live = None
        for request in self._queues.waiting:
            if self._known.get(request, (-1, 0))[0] < computed:
                live = sequences_of(self._queues.running) if live is None else live
                self._known[request] = computed, self._prefixes.known_tokens(request, live)
