"""Ranks the replicas for a request by what it costs there, in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.cluster.holders import Holders
from hetero_kv.serving.cluster.prefix_hashes import BLOCK
from hetero_kv.serving.cluster.replica_report import ReplicaReport

# Speeds of a replica before any replica has measured its own: those of 0.5B parameters on two cores.
_TOKENS_PER_S, _STEP_S = 500.0, 0.05


@dataclass(frozen=True)
class RoutedRequest:
    """A request, as far as a router looks at it.

    Attributes:
        tokens: of the prompt.
        hashes: the prompt's `block_hashes`, under the tenant's salt.
        answer_tokens: how many tokens of an answer are expected.
        stored_tokens: how many of the prompt's first tokens the shared store has, where that was looked up; replicas
            report what they have put there beside.
    """

    tokens: int
    hashes: Sequence[int]
    answer_tokens: int = 128
    stored_tokens: int = 0


@dataclass(frozen=True)
class RouterSettings:
    """How a router judges reports.

    Attributes:
        block_size: tokens of a hashed block, the same as the replicas'.
        period_s: seconds between two reports of a replica.
        fresh_periods: a report is believed for so many periods after it came.
        known_periods: after so many, nothing is known of its replica; between both, it is believed in part.
        fetch_bytes_per_s: how fast a replica reads the shared store.
        others_wait: how many requests wait for a prompt that an idle replica computes or fetches; one more for each
            request that the replica has.
    """

    block_size: int = BLOCK
    period_s: float = 0.5
    fresh_periods: float = 4
    known_periods: float = 20
    fetch_bytes_per_s: float = 100e6
    others_wait: float = 2.0


@dataclass
class _Sent:
    """A request that this router sent to a replica, of which its reports may not tell yet.

    Attributes:
        to_compute: tokens of the prompt that the replica had not.
        reports: how many reports came since.
    """

    request: RoutedRequest
    to_compute: int
    reports: int = 0


@dataclass
class _Replica:
    """What is known of a replica.

    Attributes:
        slot: its number, a column of the router's table.
        report: the latest one; None before the first.
        came: when that came, seconds of the router's clock.
        sent: requests that count beside the report, the oldest first.
        in_flight: all requests that this router sent there and that have not ended.
        has_added: whether the index has beginnings of sent requests beside the report's.
    """

    slot: int
    report: ReplicaReport | None = None
    came: float = -math.inf
    sent: list[_Sent] = field(default_factory=list)
    in_flight: int = 0
    has_added: bool = False


class Router:
    """Ranks replicas for requests; not safe for several threads at once.

    The cost of a request at a replica is the sum of seconds for: the tokens of prompts that are queued there; the
    tokens of its own prompt that the replica has not, each computed, or fetched from the shared store where that is
    faster; the steps of its answer, which take the longer the more rows there are; and a row, where all are taken.
    The seconds of its own prompt count once more for each request that will wait meanwhile: under a steady load, as
    many come while a queue passes as it has now. An idle replica counts some too (`others_wait`); otherwise, while the
    first request about a document is computed, each further one would go to an idle replica, which has it as soon. So
    a document whose replica has a long queue gets a second one, which has little to do. Where all are busy, it does
    not: what is computed twice makes queues longer, by which more would be.

    What this router has sent to a replica counts beside its report until one has the prompt's new blocks, or two have
    come: the first of them may have been made before the request came there. So requests of a burst that share a
    beginning go where the first one went, and others do not.

    Of a replica that has never reported, or not for long, nothing is known. It counts as having no beginning, the
    longest known queue, and the median of known speeds. Where costs are equal, the replica with more free blocks comes
    first; of unknown ones, that one of two random ones which has fewer requests of this router (the power of two
    choices).

    Args:
        random: breaks ties.
    """

    def __init__(self, settings: RouterSettings | None = None, random: np.random.Generator | None = None) -> None:
        self.settings = settings or RouterSettings()
        self._random = np.random.default_rng() if random is None else random
        self._replicas: dict[str, _Replica] = {}
        self._resident, self._stored = Holders(), Holders()
        self._names: list[str] = []
        self._vacant: list[int] = []
        # A column per slot, with rows: seconds per token of a prompt; tokens in the queue; seconds of a step with one
        # more row; how many times as long an answer takes for want of a row; seconds to fetch a token; free blocks;
        # when the report came; requests.
        self._table = np.zeros((8, 0))
        self._live = np.zeros(0, np.int64)
        self._usual_token_s = 1 / _TOKENS_PER_S

    def rank(self, request: RoutedRequest, replicas: Mapping[str, ReplicaReport | None], now: float) -> list[str]:
        """The names of the replicas, the best first.

        Args:
            replicas: name -> its latest report, None before the first one. Those that are missing are forgotten.
            now: seconds of a clock that does not go back, the same for all calls.

        Raises HeteroKVError for a report with blocks of another size than the router's.
        """
        self._update(replicas, now)
        if not replicas:
            return []
        settings = self.settings
        token_s, queued, step_s, answer_times, fetch_s, free, came, requests = self._table[:, self._live]
        resident = self._resident_tokens(request)[self._live]
        stored = self._stored_tokens(request)
        fetched = np.maximum(stored - resident, 0.0)
        computed = request.tokens - resident - fetched
        waited = queued * token_s + request.answer_tokens * step_s * answer_times
        work = computed * token_s + fetched * np.minimum(fetch_s, token_s)
        times = 1 + settings.others_wait + requests
        cost = waited + work * times
        fresh_s, known_s = (settings.period_s * each for each in (settings.fresh_periods, settings.known_periods))
        doubt = np.clip((now - came - fresh_s) / (known_s - fresh_s), 0.0, 1.0)
        is_known = doubt < 1
        order = np.where(is_known, -free, 2.0)
        unknown_cost = 0.0
        if doubt.any() and is_known.any():
            unknown_cost = self._unknown_cost(request, stored, np.array([waited, fetch_s, times])[:, is_known])
        cost = np.where(is_known, cost + doubt * np.maximum(unknown_cost - cost, 0.0), unknown_cost)
        self._order_unknown(order, np.flatnonzero(~is_known))
        ranked = np.lexsort((self._random.random(len(cost)), order, cost))
        return [self._names[place] for place in ranked]

    def sent(self, request: RoutedRequest, replica: str) -> None:
        """The request goes to this replica."""
        known = self._replicas.get(replica)
        if known is None:
            return
        resident = int(self._resident_tokens(request)[known.slot])
        known.sent.append(_Sent(request, request.tokens - max(resident, self._stored_tokens(request))))
        known.in_flight += 1
        self._resident.add(known.slot, request.hashes)
        known.has_added = True
        self._write(known)

    def completed(self, request: RoutedRequest, replica: str) -> None:
        """The request, which was sent to this replica, has ended."""
        known = self._replicas.get(replica)
        if known is None:
            return
        known.in_flight = max(0, known.in_flight - 1)
        known.sent = [each for each in known.sent if each.request is not request]
        self._write(known)

    def missing(self, request: RoutedRequest) -> int:
        """How many of the prompt's tokens neither any replica has nor the shared store."""
        resident = int(self._resident_tokens(request).max(initial=0))
        return request.tokens - max(resident, self._stored_tokens(request))

    # -- costs

    def _resident_tokens(self, request: RoutedRequest) -> np.ndarray:
        """By slot, how many of the prompt's first tokens are resident; the last one is always computed."""
        tokens = np.zeros(self._table.shape[1])
        for slot, depth in self._resident.depths(request.hashes).items():
            tokens[slot] = min(depth * self.settings.block_size, request.tokens - 1)
        return tokens

    def _stored_tokens(self, request: RoutedRequest) -> int:
        depth = max(self._stored.depths(request.hashes).values(), default=0)
        return min(max(depth * self.settings.block_size, request.stored_tokens), request.tokens - 1)

    def _unknown_cost(self, request: RoutedRequest, stored: int, known: np.ndarray) -> float:
        """The cost at a replica of which nothing is known, by what others wait and take."""
        waited, fetch_s, times = known
        fetch_token_s = min(float(np.median(fetch_s)), self._usual_token_s)
        work = (request.tokens - stored) * self._usual_token_s + stored * fetch_token_s
        return float(waited.max()) + work * float(times.max())

    def _order_unknown(self, order: np.ndarray, unknown: np.ndarray) -> None:
        """Put one of two random unknown replicas first, and the other one second."""
        if len(unknown) < 2:
            return
        pair = self._random.choice(unknown, 2, replace=False)
        first, second = sorted(pair, key=lambda place: self._replicas[self._names[place]].in_flight)
        order[first], order[second] = 0.0, 1.0

    # -- what is known

    def _update(self, replicas: Mapping[str, ReplicaReport | None], now: float) -> None:
        if replicas.keys() != self._replicas.keys():
            for name in self._replicas.keys() - replicas.keys():
                self._forget(self._replicas.pop(name))
            for name in [name for name in replicas if name not in self._replicas]:
                self._replicas[name] = _Replica(self._vacant.pop() if self._vacant else self._new_slot())
                self._write(self._replicas[name])
            self._names = list(self._replicas)
            self._live = np.array([each.slot for each in self._replicas.values()], np.int64)
        for name, report in replicas.items():
            known = self._replicas[name]
            if report is not None and report is not known.report:
                self._take(known, report, now)

    def _new_slot(self) -> int:
        self._table = np.pad(self._table, ((0, 0), (0, 1)))
        return self._table.shape[1] - 1

    def _forget(self, known: _Replica) -> None:
        self._resident.set(known.slot, ())
        self._stored.set(known.slot, ())
        self._vacant.append(known.slot)

    def _take(self, known: _Replica, report: ReplicaReport, now: float) -> None:
        """Believe a report, unless it is the latest one again."""
        before, known.report = known.report, report
        if before is not None and (before.counter, before.time) == (report.counter, report.time):
            return
        if report.block_size != self.settings.block_size:
            raise HeteroKVError(
                f"a replica reports blocks of {report.block_size} tokens, and the router has blocks of "
                f"{self.settings.block_size}; set the same block_size for both"
            )
        known.came = now
        for each in known.sent:
            each.reports += 1
        known.sent = [each for each in known.sent if each.reports < 2 and not self._is_in(report, each)]
        # Tuples are compared by their items, even a tuple with itself.
        is_same = before is not None and (before.resident is report.resident or before.resident == report.resident)
        if known.has_added or not is_same:
            sent = [key for each in known.sent for key in each.request.hashes]
            self._resident.set(known.slot, (*report.resident, *sent))
            known.has_added = bool(sent)
        if before is None or before.stored != report.stored:
            self._stored.set(known.slot, report.stored)
        if before is None or before.prefill_tokens_per_s != report.prefill_tokens_per_s:
            self._measure()
        self._write(known)

    def _is_in(self, report: ReplicaReport, sent: _Sent) -> bool:
        """Whether a report surely counts a request: it has the prompt's last block, which was new."""
        return sent.to_compute >= self.settings.block_size and sent.request.hashes[-1] in report.resident

    def _measure(self) -> None:
        """Take the median of measured speeds for replicas that have not measured theirs."""
        reports = [each.report for each in self._replicas.values() if each.report is not None]
        rates = [each.prefill_tokens_per_s for each in reports if each.prefill_tokens_per_s]
        usual = 1 / median(rates) if rates else self._usual_token_s
        if usual != self._usual_token_s:
            self._usual_token_s = usual
            for known in self._replicas.values():
                if known.report is None or not known.report.prefill_tokens_per_s:
                    self._write(known)

    def _write(self, known: _Replica) -> None:
        """Write a replica's column of the table."""
        report, sent = known.report or ReplicaReport(self.settings.block_size), len(known.sent)
        rate = report.prefill_tokens_per_s
        step_s = _STEP_S if report.decode_step_s is None else report.decode_step_s
        rows = report.rows + report.waiting + sent
        over = max(0, rows + 1 - report.row_limit)
        self._table[:, known.slot] = (
            1 / rate if rate else self._usual_token_s,
            report.queued_tokens + sum(each.to_compute for each in known.sent),
            step_s + report.decode_row_s * min(rows, report.row_limit - 1),
            1 + over / report.row_limit,
            report.bytes_per_token / self.settings.fetch_bytes_per_s,
            report.free_blocks,
            known.came,
            rows,
        )
