"""Where the requests of one process go, by what replicas report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.server.cluster.messages import RemoteRequest
from hetero_kv.serving.cluster.replica_report import ReplicaReport
from hetero_kv.serving.cluster.routing import Router, RouterSettings
from hetero_kv.serving.status import EngineStatus, RequestStatus

_logger = logging.getLogger(__name__)
#: Replicas that have not reported for so many periods are left out of what the server says of itself.
_KNOWN_PERIODS = 20


@dataclass(frozen=True)
class _News:
    """What a replica said last.

    Attributes:
        came: when, seconds of `time.monotonic`.
        stats: as it came, which tells whether it is new.
        reports, statuses: by model.
    """

    came: float
    stats: Mapping[str, Any]
    reports: Mapping[str, ReplicaReport]
    statuses: Mapping[str, EngineStatus]


class Placement:
    """Chooses replicas, and knows which request is where. Any thread may use it.

    Args:
        report_s: seconds between two reports of a replica.
    """

    def __init__(self, report_s: float) -> None:
        self._settings = RouterSettings(period_s=report_s)
        # By model.
        self._routers: dict[str, Router] = {}
        self._news: dict[str, _News] = {}
        # Request -> where it was sent.
        self._sent: dict[int, str] = {}
        self._lock = threading.Lock()

    def ranked(self, request: RemoteRequest, replicas: Collection[str]) -> list[str]:
        """These replicas, the best first, where the request now counts as sent."""
        with self._lock:
            router = self._routers.setdefault(request.model, Router(self._settings))
            news = {name: self._news.get(name) for name in replicas}
            reports = {name: None if each is None else each.reports.get(request.model) for name, each in news.items()}
            ranked = router.rank(request.routed, reports, time.monotonic())
            # Where they have failed, requests go only if there is nothing else.
            ranked.sort(key=lambda name: name in request.avoided)
            self._move(request, ranked[0])
            return ranked

    def missing(self, request: RemoteRequest) -> int:
        """How many tokens of the prompt are known nowhere, as far as replicas have reported."""
        with self._lock:
            return self._routers.setdefault(request.model, Router(self._settings)).missing(request.routed)

    def went(self, request: RemoteRequest, replica: str) -> None:
        """The request was sent there in the end, for the best one may have been full."""
        with self._lock:
            if self._sent.get(request.number, replica) != replica:
                self._move(request, replica)

    def _move(self, request: RemoteRequest, replica: str) -> None:
        self._forget(request)
        self._routers[request.model].sent(request.routed, replica)
        self._sent[request.number] = replica

    def _forget(self, request: RemoteRequest) -> str | None:
        before = self._sent.pop(request.number, None)
        if before is not None:
            self._routers[request.model].completed(request.routed, before)
        return before

    def ended(self, request: RemoteRequest) -> str | None:
        """The request has ended, or is given up. Returns where it was sent."""
        with self._lock:
            return self._forget(request)

    def learn(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Take what replicas reported, by name; others are gone. What has not changed is no news."""
        now = time.monotonic()
        with self._lock:
            read = {name: self._read(name, each, now) for name, each in stats.items()}
            self._news = {name: each for name, each in read.items() if each is not None}

    def _read(self, name: str, stats: Mapping[str, Any], now: float) -> _News | None:
        known = self._news.get(name)
        if known is not None and stats == known.stats:
            return known
        if not stats:
            return None
        try:
            return _News(
                now,
                stats,
                {model: ReplicaReport.from_dict(each["report"]) for model, each in stats.items()},
                {model: _status(each["status"]) for model, each in stats.items()},
            )
        except (HeteroKVError, TypeError, KeyError) as error:
            # It stays one of which nothing is known.
            _logger.warning("the report of replica %s cannot be read: %s", name, error)
            return None

    def statuses(self, model: str) -> Sequence[EngineStatus]:
        """The states of a model's engines at all replicas that still report."""
        oldest = time.monotonic() - _KNOWN_PERIODS * self._settings.period_s
        with self._lock:
            news = list(self._news.values())
        return [each.statuses[model] for each in news if each.came >= oldest and model in each.statuses]


_placements: dict[tuple[str, str], Placement] = {}
_making = threading.Lock()


def placement_of(app: str, deployment: str, report_s: float) -> Placement:
    """The placement of this process for a deployment: Ray's router for it and the engine that asks share it.

    Ray makes its routers by itself, and hands them to nobody.
    """
    with _making:
        return _placements.setdefault((app, deployment), Placement(report_s))


def _status(plain: Mapping[str, Any]) -> EngineStatus:
    requests = tuple(RequestStatus(*each) for each in plain["requests"])
    return EngineStatus(**{**plain, "requests": requests})
