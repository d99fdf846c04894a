"""The recorded trace of the measured cluster, simulated: what its two replicas would do under each router."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from benchmarks.measured_cluster.trace import Conversation
from benchmarks.simulated_cluster.replica import Question
from benchmarks.simulated_cluster.routers import ROUTERS, Ours
from benchmarks.simulated_cluster.stepping_replica import StepCosts, SteppingReplica, hashes
from hetero_kv.serving.cluster.routing import RoutedRequest, RouterSettings

ANSWER, QUESTION = 16, 10
"""Tokens of an answer, and of a question behind a document or an answer."""


class TraceSimulation:
    """One run of a trace: each further question comes some seconds after the answer before it.

    Args:
        router: a name in `ROUTERS`; ours is one router here, with a report every half a second.
        replicas: how many.
        keeps_turns: as of `SteppingReplica`.
    """

    def __init__(
        self, trace: Sequence[Conversation], router: str, replicas: int = 2, costs: StepCosts | None = None,
        keeps_turns: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        costs = costs or StepCosts()
        self._trace = trace
        self._replicas = [SteppingReplica(f"replica {number}", costs, keeps_turns) for number in range(replicas)]
        alive: Any = {each.name: each for each in self._replicas}
        random = np.random.default_rng(seed)
        self._router = Ours(alive, random, RouterSettings(), 1) if router == "ours" else ROUTERS[router](alive, random)
        self._alive, self._numbers = alive, itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        # The ingress admits as many questions at a time as the replicas answer.
        self._admitted, self._limit = 0, replicas * costs.row_limit
        self._waiting: deque[Question] = deque()
        self._asked: dict[Question, tuple[Conversation, int, str]] = {}
        self._stepping: set[str] = set()
        self._over = 0.0
        self.ended: list[Question] = []

    def run(self) -> Self:
        """Simulate until every answer has ended."""
        for each in self._trace:
            self._at(each.at_s, self._ask, each, 0)
        while self._events:
            now, _, act, arguments = heapq.heappop(self._events)
            act(now, *arguments)
        return self

    def row(self, name: str) -> list[str]:
        """The figures, as the measured cluster's `COLUMNS` has them."""
        lengths = {each.document: each.tokens for each in self._trace}
        firsts = sorted((each.first_token_at or 0.0) - each.came for each in self.ended)
        hits, tokens = sum(each.hits for each in self.ended), sum(each.tokens for each in self.ended)
        computed = sum(each.hits < each.document_tokens / 2 for each in self.ended)
        loads = [each.busy_s for each in self._replicas]
        return [
            name,
            f"{100 * hits / tokens:.1f} %",
            f"{statistics.median(firsts):.2f} s",
            f"{statistics.quantiles(firsts, n=100, method='inclusive')[98]:.2f} s",
            f"{max(loads) / statistics.mean(loads):.2f}",
            f"{computed / len(lengths):.2f}",
            f"{self._over:.0f} s",
        ]

    def _at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act, arguments))

    def _ask(self, now: float, conversation: Conversation, turn: int) -> None:
        tokens = conversation.tokens + QUESTION * (turn + 1) + ANSWER * turn
        routed = RoutedRequest(tokens, hashes(conversation.document, tokens), ANSWER)
        question = Question(next(self._numbers), conversation.document, conversation.tokens, ANSWER, now, routed)
        self._asked[question] = conversation, turn, ""
        self._waiting.append(question)
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self._waiting and self._admitted < self._limit:
            question = self._waiting.popleft()
            self._admitted += 1
            name = self._router.choose(question, now)
            replica = self._alive[name]
            self._router.before_change(replica, now)
            replica.add(question)
            self._asked[question] = (*self._asked[question][:2], name)
            if name not in self._stepping:
                self._stepping.add(name)
                self._step(now, replica)

    def _step(self, now: float, replica: Any) -> None:
        if not replica.queue_length:
            self._stepping.remove(replica.name)
            return
        self._router.before_change(replica, now)
        end, ended = replica.step(now)
        self._at(end, self._end, replica, ended)

    def _end(self, now: float, replica: Any, ended: Sequence[Question]) -> None:
        for question in ended:
            conversation, turn, name = self._asked.pop(question)
            self._router.ended(question, name)
            self.ended.append(question)
            self._admitted -= 1
            self._over = now
            if turn < len(conversation.pauses_s):
                self._at(now + conversation.pauses_s[turn], self._ask, conversation, turn + 1)
        self._admit(now)
        self._step(now, replica)
