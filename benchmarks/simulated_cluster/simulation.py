"""Questions come, go where a router sends them, and end; replicas fail and come back."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.simulated_cluster.costs import Costs
from benchmarks.simulated_cluster.replica import Question, Replica
from benchmarks.simulated_cluster.routers import ROUTERS
from hetero_kv.serving.cluster.prefix_hashes import BLOCK
from hetero_kv.serving.cluster.routing import RoutedRequest


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        router: a name in `ROUTERS`.
        per_s: conversations that begin in a second, at random times.
        conversations: each is one question about one document.
        documents: of log-normal lengths, `document_tokens` in the mean; the n-th is asked about 1 / n as often as the
            first one (Zipf).
        question_tokens: of each question.
        answer_tokens: of an answer in the mean, geometrically distributed.
        memory_tokens: of documents that a replica keeps.
        shared_store: whether a document that was computed once is fetched by others.
        fetch_bytes_per_s: from that store.
        life_s: a replica's mean time to its next failure.
        detected_s: seconds until it is known, and its questions are sent again.
        repaired_s: seconds until it is there again, with empty memory.
    """

    router: str
    per_s: float = 8.0
    conversations: int = 1_000_000
    replicas: int = 100
    documents: int = 10_000
    document_tokens: int = 2_700
    question_tokens: int = 50
    answer_tokens: int = 64
    memory_tokens: int = 200_000
    shared_store: bool = False
    fetch_bytes_per_s: float = 100e6
    life_s: float = 86_400.0
    detected_s: float = 1.0
    repaired_s: float = 300.0
    seed: int = 0
    costs: Costs = field(default_factory=Costs)


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        hits: of each conversation, the tokens of its prompt that were taken over from memory or the store.
        tokens: of each prompt.
        first_token_s: of each conversation, from its coming to its first token.
        total_s: of each, to the end of its answer.
        loads: of each replica the seconds in which it computed.
        prefills: document -> how often it was computed.
        sent_again: how many questions were at a replica that failed.
    """

    hits: np.ndarray
    tokens: np.ndarray
    first_token_s: np.ndarray
    total_s: np.ndarray
    loads: np.ndarray
    prefills: Counter[int]
    sent_again: int

    @property
    def balance(self) -> float:
        """The largest load over the mean."""
        return float(self.loads.max() / self.loads.mean())

    @property
    def prefills_per_document(self) -> float:
        """How often a document was computed that was asked about at all, in the mean."""
        return sum(self.prefills.values()) / len(self.prefills)


class Simulation:
    """One run of a scenario, of which all draws but the router's are the same for every router."""

    def __init__(self, scenario: Scenario) -> None:
        import simpy

        self._scenario, self._env = scenario, simpy.Environment()
        random = np.random.default_rng(scenario.seed)
        count, documents = scenario.conversations, scenario.documents
        spread = 0.8
        lengths = random.lognormal(math.log(scenario.document_tokens) - spread**2 / 2, spread, documents)
        self._lengths = np.clip(lengths, BLOCK, 16_384).astype(int).tolist()
        weights = np.cumsum(1 / np.arange(1, documents + 1))
        self._asked = np.searchsorted(weights, random.random(count) * weights[-1]).tolist()
        self._gaps = random.exponential(1 / scenario.per_s, count).tolist()
        self._answers = random.geometric(1 / scenario.answer_tokens, count).tolist()
        # Stand-ins for hashes: every block of every document has a number of its own.
        first = np.concatenate([[0], np.cumsum([length // BLOCK for length in self._lengths])])
        self._hashes = [tuple(range(*each)) for each in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]
        fetches = (set[int](), scenario.fetch_bytes_per_s) if scenario.shared_store else None
        self._replicas = [
            Replica(f"replica {number}", scenario.costs, scenario.memory_tokens, self._hashes, fetches)
            for number in range(scenario.replicas)
        ]
        self._alive = {each.name: each for each in self._replicas}
        self._router = ROUTERS[scenario.router](self._alive, np.random.default_rng([scenario.seed, 1]))
        self._failures = np.random.default_rng([scenario.seed, 2])
        self._lost: dict[str, list[Question]] = {each.name: [] for each in self._replicas}
        self._first, self._total, self._hits, self._tokens = np.full((4, count), np.nan)
        self._ended = self._sent_again = 0
        self._over = self._env.event()

    def run(self) -> Outcome:
        """Simulate until every answer has ended."""
        self._env.process(self._arrivals())
        for replica in self._replicas:
            self._env.process(self._life(replica))
        self._env.run(self._over)
        prefills = Counter[int]()
        for each in self._replicas:
            prefills.update(each.prefills)
        return Outcome(
            self._hits, self._tokens, self._first, self._total, np.array([each.busy_s for each in self._replicas]),
            prefills, self._sent_again,
        )  # fmt: skip

    def _arrivals(self) -> Any:
        scenario = self._scenario
        for number, document in enumerate(self._asked):
            yield self._env.timeout(self._gaps[number])
            tokens = self._lengths[document]
            routed = RoutedRequest(
                tokens + scenario.question_tokens, self._hashes[document], answer_tokens=scenario.answer_tokens
            )
            self._send(Question(number, document, tokens, self._answers[number], self._env.now, routed))

    def _send(self, question: Question) -> None:
        name = self._router.choose(question, self._env.now)
        replica = self._alive[name]
        if replica.is_down:
            self._lost[name].append(question)
            return
        self._change(replica, question)

    def _change(self, replica: Replica, question: Question | None = None) -> None:
        now = self._env.now
        self._router.before_change(replica, now)
        for ended in replica.advance(now):
            self._end(ended, replica)
        if question is not None:
            replica.add(question)
        replica.version += 1
        if (at := replica.next_change) < math.inf:
            event = self._env.timeout(max(0.0, at - now), (replica, replica.version))
            event.callbacks.append(self._wake)

    def _wake(self, event: Any) -> None:
        replica, version = event.value
        if version == replica.version:
            self._change(replica)

    def _end(self, question: Question, replica: Replica) -> None:
        self._router.ended(question, replica.name)
        assert question.first_token_at is not None
        self._first[question.number] = question.first_token_at - question.came
        self._total[question.number] = self._env.now - question.came
        self._hits[question.number], self._tokens[question.number] = question.hits, question.tokens
        self._ended += 1
        if self._ended == self._scenario.conversations:
            self._over.succeed()

    def _life(self, replica: Replica) -> Any:
        scenario, name = self._scenario, replica.name
        while True:
            yield self._env.timeout(self._failures.exponential(scenario.life_s))
            replica.advance(self._env.now)
            self._lost[name] += replica.fail()
            yield self._env.timeout(scenario.detected_s)
            if len(self._alive) == 1:
                # The last one is repaired at once.
                replica.is_down = False
            else:
                del self._alive[name]
                self._router.died(name)
            lost, self._lost[name] = self._lost[name], []
            self._sent_again += len(lost)
            for question in lost:
                self._send(question)
            yield self._env.timeout(scenario.repaired_s)
            replica.is_down = False
            self._alive[name] = replica
