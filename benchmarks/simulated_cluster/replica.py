"""A simulated replica: one prompt passes at a time, rows share the steps, and documents leave memory by age."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulated_cluster.costs import Costs
from hetero_kv.serving.cluster.prefix_hashes import BLOCK
from hetero_kv.serving.cluster.replica_report import LIMIT, ReplicaReport, sketch
from hetero_kv.serving.cluster.routing import RoutedRequest


@dataclass(eq=False)
class Question:
    """A question about a document.

    Attributes:
        number: which one it is.
        document: the number of its document.
        document_tokens: the document's tokens; a prompt has `tokens`, the question's included.
        answer_tokens: of the answer.
        came: when it came, seconds.
        routed: as the router sees it.
        first_token_at: when its prompt had passed; None until then.
        to_compute: tokens that are still to pass, once its prompt passes.
        hits: tokens that it took over from memory.
    """

    number: int
    document: int
    document_tokens: int
    answer_tokens: int
    came: float
    routed: RoutedRequest
    first_token_at: float | None = None
    to_compute: float = 0.0
    hits: int = 0

    @property
    def tokens(self) -> int:
        """Of its prompt."""
        return self.routed.tokens


class Replica:
    """A replica, whose state changes when a prompt has passed, an answer ends or a question comes.

    Between two changes everything goes on evenly: a prompt passes at a rate, and every row gets a token per step, both
    by the number of rows.

    Args:
        memory_tokens: how many tokens of documents are kept.
        hashes: document -> its block hashes.
        fetches: the store that all replicas share, document by document, and bytes per second; None for no such store.

    Attributes:
        busy_s: seconds in which it computed.
        version: which of its changes was the last one, for who waits for the next.
        is_down: whether it has failed and is not repaired.
        prefills: document -> how often it was computed.
    """

    def __init__(
        self, name: str, costs: Costs, memory_tokens: int, hashes: Sequence[tuple[int, ...]],
        fetches: tuple[set[int], float] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.costs, self._memory_tokens = name, costs, memory_tokens
        self._hashes, self._fetches = hashes, fetches
        self.busy_s, self.prefills = 0.0, Counter[int]()
        self.version, self.is_down = 0, False
        self._counter = itertools.count(1)
        self._now = self._decoded = 0.0
        self._rows: list[tuple[float, int, Question]] = []
        self.passing: Question | None = None
        self.waiting: deque[Question] = deque()
        # By age, the least recently used first: document -> tokens.
        self._kept: dict[int, int] = {}
        self._kept_tokens = 0
        self._in_use = Counter[int]()
        self._sketch: tuple[int, ...] | None = None

    def fail(self) -> list[Question]:
        """It is down, and loses what it has. Returns its questions."""
        lost = [*(each for _, _, each in self._rows), *([] if self.passing is None else [self.passing]), *self.waiting]
        self._rows, self.passing, self._sketch, self.is_down = [], None, None, True
        for each in (self.waiting, self._kept, self._in_use):
            each.clear()
        self._kept_tokens = 0
        self.version += 1
        return lost

    @property
    def queue_length(self) -> int:
        """How many questions have not ended, as Ray counts a replica's queue."""
        return len(self._rows) + (self.passing is not None) + len(self.waiting)

    # -- time

    def advance(self, now: float) -> list[Question]:
        """Go on until `now`, which is no later than `next_change`. Returns the questions that have ended."""
        passed = now - self._now
        self._now = now
        rows = len(self._rows)
        ended: list[Question] = []
        if self.passing is None and not rows:
            return ended
        self.busy_s += passed
        if rows:
            self._decoded += passed / self._step_s()
        if self.passing is not None:
            self.passing.to_compute -= passed * self.costs.beside_per_s[rows]
        while self._rows and self._rows[0][0] <= self._decoded + 1e-6:
            ended.append(heapq.heappop(self._rows)[2])
        if self.passing is not None and self.passing.to_compute <= 1e-6:
            self._answer(self.passing)
            self.passing = None
        for each in ended:
            self._in_use[each.document] -= 1
        self._begin()
        return ended

    @property
    def next_change(self) -> float:
        """When a prompt has passed or an answer ends, seconds; infinite for an idle replica."""
        rows, soonest = len(self._rows), math.inf
        if rows:
            soonest = (self._rows[0][0] - self._decoded) * self._step_s()
        if self.passing is not None:
            soonest = min(soonest, self.passing.to_compute / self.costs.beside_per_s[rows])
        return self._now + max(0.0, soonest)

    def _step_s(self) -> float:
        of = self.costs.alone_s if self.passing is None else self.costs.beside_s
        return of[len(self._rows)]

    # -- questions

    def add(self, question: Question) -> None:
        """A question comes, at the time to which the replica was advanced."""
        self.waiting.append(question)
        if question.document not in self._kept:
            self._sketch = None
        self._begin()

    def _begin(self) -> None:
        if self.passing is not None or not self.waiting or len(self._rows) == self.costs.row_limit:
            return
        question = self.passing = self.waiting.popleft()
        document, tokens = question.document, question.document_tokens
        self._in_use[document] += 1
        question.to_compute = float(question.tokens)
        if document in self._kept:
            question.hits = tokens
            question.to_compute -= tokens
            # It is the most recently used one now.
            self._kept[document] = self._kept.pop(document)
            return
        self._sketch = None
        if self._fetches is not None and document in self._fetches[0]:
            seconds = tokens * self.costs.bytes_per_token / self._fetches[1]
            question.hits = tokens
            question.to_compute += seconds * self.costs.prefill_tokens_per_s - tokens
        else:
            self.prefills[document] += 1
        self._kept[document] = tokens
        self._kept_tokens += tokens
        self._evict()

    def _evict(self) -> None:
        if self._kept_tokens <= self._memory_tokens:
            return
        for document in list(self._kept):
            if self._in_use[document] <= 0:
                self._kept_tokens -= self._kept.pop(document)
                if self._kept_tokens <= self._memory_tokens:
                    return

    def _answer(self, question: Question) -> None:
        question.first_token_at = self._now
        if self._fetches is not None:
            self._fetches[0].add(question.document)
        heapq.heappush(self._rows, (self._decoded + question.answer_tokens, question.number, question))

    # -- what it tells

    def report(self, now: float) -> ReplicaReport:
        """What the replica reports at `now`, before its next change."""
        if self._sketch is None:
            waiting = [each.document for each in self.waiting]
            kept = dict.fromkeys([*waiting, *reversed(self._kept)])
            self._sketch = sketch([self._hashes[document] for document in kept], LIMIT)
        queued, before = 0.0, set[int]()
        if self.passing is not None:
            passed = (now - self._now) * self.costs.beside_per_s[len(self._rows)]
            queued = max(0.0, self.passing.to_compute - passed)
        for each in self.waiting:
            is_known = each.document in self._kept or each.document in before
            queued += each.tokens - (each.document_tokens if is_known else 0)
            before.add(each.document)
        costs = self.costs
        return ReplicaReport(
            block_size=BLOCK,
            resident=self._sketch,
            stored=self._sketch if self._fetches is not None else (),
            rows=len(self._rows) + (self.passing is not None),
            row_limit=costs.row_limit,
            waiting=len(self.waiting),
            queued_tokens=round(queued),
            free_blocks=max(0, self._memory_tokens - self._kept_tokens) // BLOCK,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
            decode_step_s=costs.alone_s[1],
            decode_row_s=costs.row_s,
            bytes_per_token=costs.bytes_per_token,
            counter=next(self._counter),
            time=now,
        )
