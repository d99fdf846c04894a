"""A simulated replica that goes step by step as an engine does, and keeps its last sequences."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulated_cluster.replica import Question
from hetero_kv.serving.cluster.prefix_hashes import BLOCK
from hetero_kv.serving.cluster.replica_report import ReplicaReport, sketch
from hetero_kv.serving.part_size import SMALL, PartSize


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a forward of SmolLM2-135M under `dense` by one thread of two Cascade Lake cores.

    Attributes:
        shared: how much longer everything takes because replicas, clients, Ray and ingress share the cores.
        begin_s: to begin a question, its beginning found.
        read_s: to read the weights.
        row_s: of each row beyond the first one.
        small_token_s: of each token of a small part.
        large_token_s: of each token of a large part, the weights' reading included.
        row_limit: the most rows.
        kept: the most sequences of ended questions.
        part: the most tokens of a part.
    """

    shared: float = 1.25
    begin_s: float = 0.1
    read_s: float = 0.042
    row_s: float = 0.0045
    small_token_s: float = 0.0025
    large_token_s: float = 1 / 320
    row_limit: int = 8
    kept: int = 16
    part: int = 512

    def seconds(self, tokens: int, rows: int) -> float:
        """Seconds of a forward of a part of a prompt and a token of each row."""
        if tokens > SMALL:
            return self.shared * (self.large_token_s * tokens + self.row_s * rows)
        return self.shared * (self.read_s + self.small_token_s * tokens + self.row_s * max(0, rows - 1))


@dataclass(frozen=True)
class _Kept:
    """A sequence in memory: the first tokens of questions and answers about a document."""

    document: int
    tokens: int


class SteppingReplica:
    """A replica; its state changes at the end of a step, and when a question comes.

    The questions about a document in one turn are the same, so two sequences about it share the shorter one's
    tokens.

    Args:
        keeps_turns: whether a sequence is kept beside a longer one that begins with it.

    Attributes:
        queue_length: questions that have not ended.
        busy_s: seconds in which it computed.
        is_down: never.
    """

    def __init__(self, name: str, costs: StepCosts, keeps_turns: bool = False) -> None:
        self.name, self._costs, self._keeps_turns = name, costs, keeps_turns
        self.busy_s, self.is_down = 0.0, False
        self._waiting: deque[Question] = deque()
        self._passing: Question | None = None
        # With how many tokens of its answer each has.
        self._rows: dict[Question, int] = {}
        # The least recently used first.
        self._kept: list[_Kept] = []
        self._part_size = PartSize(0.25, costs.part)
        # As measured on prompts before the trace.
        self._part_size.passed(1, costs.shared * costs.large_token_s)
        self._counter = itertools.count(1)

    @property
    def queue_length(self) -> int:
        """See the class."""
        return len(self._rows) + (self._passing is not None) + len(self._waiting)

    def add(self, question: Question) -> None:
        """A question comes."""
        self._waiting.append(question)

    def step(self, now: float) -> tuple[float, list[Question]]:
        """Compute a step from `now` on. Returns its end, seconds, and the questions whose answers it ends."""
        seconds = self._admit()
        passing, rows = self._passing, len(self._rows)
        if passing is not None:
            size = self._part_size.of(int(passing.to_compute), rows, beside=True)
            if size <= SMALL:
                took = self._costs.seconds(size, rows)
                self._part_size.passed(size + rows, took)
            else:
                took = self._costs.seconds(size, 0)
                self._part_size.passed(size, took)
                took += self._costs.seconds(0, rows) if rows else 0.0
            seconds += took
            passing.to_compute -= size
        elif rows:
            seconds += self._costs.seconds(0, rows)
            self._part_size.decoded(seconds)
        self.busy_s += seconds
        ended = [each for each in self._rows if self._rows[each] + 1 == each.answer_tokens]
        self._rows = {each: count + 1 for each, count in self._rows.items() if each not in ended}
        if passing is not None and not passing.to_compute:
            self._passing, self._rows[passing] = None, 1
            passing.first_token_at = now + seconds
        for each in ended:
            # The last token of an answer is not stored.
            self._keep(_Kept(each.document, each.tokens + each.answer_tokens - 1))
        return now + seconds, ended

    def _admit(self) -> float:
        if self._passing is not None or not self._waiting or len(self._rows) == self._costs.row_limit:
            return 0.0
        question = self._passing = self._waiting.popleft()
        kept = [each for each in self._kept if each.document == question.document]
        live = [each.tokens for each in self._rows if each.document == question.document]
        question.hits = min(max((*(each.tokens for each in kept), *live), default=0), question.tokens - 1)
        question.to_compute = question.tokens - question.hits
        used = next((each for each in reversed(kept) if each.tokens >= question.hits), None)
        if used is not None:
            self._kept.append(self._kept.pop(self._kept.index(used)))
        return self._costs.shared * self._costs.begin_s

    def _keep(self, new: _Kept) -> None:
        if not self._keeps_turns:
            alike = [each for each in self._kept if each.document == new.document]
            new = max([*alike, new], key=lambda each: each.tokens)
            self._kept = [each for each in self._kept if each not in alike]
        self._kept = [*self._kept, new][-self._costs.kept :]

    # -- what it tells

    def report(self, now: float) -> ReplicaReport:
        """What the replica reports."""
        passing = [] if self._passing is None else [self._passing]
        begun = [*self._rows, *passing]
        known = {key for each in begun for key in each.routed.hashes}
        known.update(key for each in self._kept for key in hashes(each.document, each.tokens))
        queued = sum(each.to_compute for each in passing)
        for each in self._waiting:
            common = next((i for i, key in enumerate(each.routed.hashes) if key not in known), len(each.routed.hashes))
            queued += max(1, each.tokens - common * BLOCK)
            known.update(each.routed.hashes)
        sequences = [each.routed.hashes for each in (*begun, *self._waiting)]
        sequences += [hashes(each.document, each.tokens) for each in reversed(self._kept)]
        costs = self._costs
        return ReplicaReport(
            block_size=BLOCK,
            resident=sketch(sequences),
            rows=len(begun),
            row_limit=costs.row_limit,
            waiting=len(self._waiting),
            queued_tokens=round(queued),
            prefill_tokens_per_s=1 / (costs.shared * costs.large_token_s),
            decode_step_s=costs.shared * costs.read_s,
            decode_row_s=costs.shared * costs.row_s,
            counter=next(self._counter),
            time=now,
        )


def hashes(document: int, tokens: int) -> Sequence[int]:
    """Stand-ins for the block hashes of the first tokens of questions about a document."""
    return tuple(range(document << 20, (document << 20) + tokens // BLOCK))
