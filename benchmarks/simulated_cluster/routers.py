"""The routers under simulation: ours, which is the product's code, and models of those of Ray Serve 2.60."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from benchmarks.simulated_cluster.replica import Question, Replica
from hetero_kv.serving.cluster.replica_report import ReplicaReport
from hetero_kv.serving.cluster.routing import Router, RouterSettings

# Characters of a token of English text.
_CHARACTERS = 4


class SimulatedRouter(Protocol):
    """Chooses among the replicas that are alive, by their names."""

    def choose(self, question: Question, now: float) -> str:
        """The replica that gets a question."""

    def ended(self, question: Question, name: str) -> None:
        """A question has ended at a replica."""

    def before_change(self, replica: Replica, now: float) -> None:
        """The state of a replica is about to change."""

    def died(self, name: str) -> None:
        """A replica is known to be dead."""


class _Plain:
    """What routers without knowledge of their own have in common."""

    def __init__(self, alive: Mapping[str, Replica], random: np.random.Generator) -> None:
        self._alive, self._random = alive, random

    def ended(self, question: Question, name: str) -> None:
        """Nothing is known of it."""

    def before_change(self, replica: Replica, now: float) -> None:
        """Nothing is known of it."""

    def died(self, name: str) -> None:
        """Nothing is known of it."""

    def _less_used_of_two(self) -> str:
        names = list(self._alive)
        first = int(self._random.integers(len(names)))
        second = (first + 1 + int(self._random.integers(max(1, len(names) - 1)))) % len(names)
        return min((names[first], names[second]), key=lambda name: self._alive[name].queue_length)


class RoundRobin(_Plain):
    """`RoundRobinRouter`: one replica after the other."""

    def __init__(self, alive: Mapping[str, Replica], random: np.random.Generator) -> None:
        super().__init__(alive, random)
        self._turns = itertools.count()

    def choose(self, question: Question, now: float) -> str:
        """See SimulatedRouter."""
        return list(self._alive)[next(self._turns) % len(self._alive)]


class PowerOfTwo(_Plain):
    """`PowerOfTwoChoicesRequestRouter`: of two random replicas that with the shorter queue, which it knows exactly."""

    def choose(self, question: Question, now: float) -> str:
        """See SimulatedRouter."""
        return self._less_used_of_two()


class PrefixCacheAffinity(_Plain):
    """`PrefixCacheAffinityRouter` with its default settings, but for the threshold of imbalance.

    A tree of characters remembers which replicas have been sent a document, whether they still have it or not: nothing
    leaves the tree. Among those, the one with the shortest queue is taken. A document that the tree does not know goes
    to the replica with the fewest characters. Where the longest queue is longer than the shortest one by more than
    `threshold`, the power of two choices is taken for every request.
    """

    def __init__(self, alive: Mapping[str, Replica], random: np.random.Generator, threshold: float = math.inf) -> None:
        super().__init__(alive, random)
        self._threshold = threshold
        self._holders: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._characters: defaultdict[str, int] = defaultdict(int)

    def choose(self, question: Question, now: float) -> str:
        """See SimulatedRouter."""
        chosen = self._chosen(question)
        holders = self._holders[question.document]
        if chosen not in holders:
            holders[chosen] = None
            self._characters[chosen] += _CHARACTERS * question.document_tokens
        self._characters[chosen] += _CHARACTERS * (question.tokens - question.document_tokens)
        return chosen

    def _chosen(self, question: Question) -> str:
        if self._threshold < math.inf:
            lengths = [replica.queue_length for replica in self._alive.values()]
            if max(lengths) - min(lengths) > self._threshold:
                return self._less_used_of_two()
        candidates = [name for name in self._holders[question.document] if name in self._alive]
        if not candidates:
            fewest = min(self._characters[name] for name in self._alive)
            candidates = [name for name in self._alive if self._characters[name] == fewest]
        return min(candidates, key=lambda name: self._alive[name].queue_length)

    def died(self, name: str) -> None:
        """See SimulatedRouter."""
        self._characters.pop(name, None)
        for holders in self._holders.values():
            holders.pop(name, None)


class Ours:
    """`hetero_kv.serving.cluster.routing.Router`, several of them, each of which sees its share of the requests.

    Args:
        proxies: how many; they share nothing but the replicas' reports.
    """

    def __init__(
        self, alive: Mapping[str, Replica], random: np.random.Generator, settings: RouterSettings, proxies: int
    ) -> None:
        self._alive, self._period_s = alive, settings.period_s
        self._routers = [Router(settings, random) for _ in range(proxies)]
        self._reports: dict[str, ReplicaReport | None] = {}
        # Name -> when its next report is due, and the same by time; replicas do not report all at once.
        self._due: dict[str, float] = {}
        self._next: list[tuple[float, str]] = []
        self._random = random

    def choose(self, question: Question, now: float) -> str:
        """See SimulatedRouter."""
        if len(self._reports) < len(self._alive):
            for name in [name for name in self._alive if name not in self._reports]:
                self._reports[name] = None
                self._expect(name, now + self._period_s * float(self._random.random()))
        while self._next and self._next[0][0] <= now:
            at, name = heapq.heappop(self._next)
            if self._due.get(name) == at:
                self._take(name, now)
        router = self._router(question)
        name = router.rank(question.routed, self._reports, now)[0]
        router.sent(question.routed, name)
        return name

    def _router(self, question: Question) -> Router:
        return self._routers[question.number % len(self._routers)]

    def ended(self, question: Question, name: str) -> None:
        """See SimulatedRouter."""
        self._router(question).completed(question.routed, name)

    def before_change(self, replica: Replica, now: float) -> None:
        """The last report that was due before comes now, if it has not come."""
        if now >= self._due.get(replica.name, math.inf):
            self._take(replica.name, now)

    def _take(self, name: str, now: float) -> None:
        at = self._due[name] + (now - self._due[name]) // self._period_s * self._period_s
        replica = self._alive[name]
        if not replica.is_down:
            self._reports[name] = replica.report(at)
        self._expect(name, at + self._period_s)

    def _expect(self, name: str, due: float) -> None:
        self._due[name] = due
        heapq.heappush(self._next, (due, name))

    def died(self, name: str) -> None:
        """See SimulatedRouter."""
        self._reports.pop(name, None)
        self._due.pop(name, None)


#: Name -> what makes the router of the living replicas.
Maker = Callable[[Mapping[str, Replica], np.random.Generator], SimulatedRouter]
ROUTERS: dict[str, Maker] = {
    "ours": lambda alive, random: Ours(alive, random, RouterSettings(period_s=2.0), proxies=2),
    "PrefixCacheAffinityRouter": PrefixCacheAffinity,
    "PrefixCacheAffinityRouter, threshold 10": lambda alive, random: PrefixCacheAffinity(alive, random, 10),
    "power of two choices": PowerOfTwo,
    "round robin": RoundRobin,
}
