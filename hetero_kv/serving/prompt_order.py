"""The order in which prompts are computed: short ones overtake long ones, which wait for a bounded time."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from hetero_kv.serving.part_size import SMALL
from hetero_kv.serving.prefixes import ResidentPrefixes, sequences_of
from hetero_kv.serving.prompt_speed import PromptSpeed
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request

# Tokens of prompts per second, before the first one was measured.
_ASSUMED = 300.0


class _KnownTokens(NamedTuple):
    """How many tokens of a prompt need not be computed.

    Attributes:
        stored: on the disk.
        most: there or in memory.
        computed_prompts: how many prompts were computed before; further ones may share more.
    """

    stored: int
    most: int
    computed_prompts: int


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
        # Of waiting requests.
        self._known: WeakKeyDictionary[Request, _KnownTokens] = WeakKeyDictionary()

    def first_waiting(self) -> Request | None:
        """The waiting request to admit next; None if there is none, or prompts in progress come first.

        Prompts in progress that are computed in one step keep only those waiting that will share their beginning.
        """
        waiting, passing = self._queues.waiting, self._queues.prefilling
        if len(waiting) + len(passing) < 2:
            return waiting[0] if waiting else None
        self._estimate()
        first = min((each for each in waiting if not self._awaits_prefix(each)), key=self._due, default=None)
        if first is None or sum(len(each.tokens) - each.stored for each in passing) < SMALL:
            return first
        return None if any(self._due(each) <= self._due(first) for each in passing) else first

    def passing(self) -> list[Request]:
        """The requests whose prompts are in progress, in the order in which these are computed."""
        return sorted(self._queues.prefilling, key=self._due)

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether a prompt in progress is computing tokens that a waiting request can reuse."""
        if request.swapped is not None or not request.reuses or not self._prefixes.are_shared:
            return False
        begun = request.tokens[: self._known[request].most + SMALL]
        return len(begun) < len(request.tokens) and any(
            each.tenant == request.tenant and each.priority <= request.priority and each.tokens[: len(begun)] == begun
            for each in self._queues.prefilling
        )

    def _due(self, request: Request) -> tuple[int, float]:
        """A request's priority, and when its prompt would be computed alone, seconds of `time.perf_counter`."""
        if request.swapped is not None:
            return request.priority, request.began
        known = self._known[request].most if request.cache is None else request.reuse.tokens
        missing = len(request.tokens) - known
        return request.priority, request.began + missing / (self._speed.tokens_per_s or _ASSUMED)

    def _estimate(self) -> None:
        """Look up the known tokens of waiting requests; in memory again after every computed prompt."""
        computed, prefixes = self._queues.computed_prompts, self._prefixes
        live = None
        for request in self._queues.waiting:
            before = self._known.get(request)
            if before is not None and before.computed_prompts == computed:
                continue
            if not request.reuses or not prefixes.are_shared:
                self._known[request] = _KnownTokens(0, 0, computed)
                continue
            live = sequences_of(self._queues.running) if live is None else live
            stored = before.stored if before is not None else prefixes.stored_tokens(request.tokens, request.tenant)
            most = max(stored, prefixes.common(request.tokens, request.tenant, live))
            self._known[request] = _KnownTokens(stored, most, computed)
