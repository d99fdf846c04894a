"""Prometheus metrics of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hetero_kv.server.served import ServedModel
from hetero_kv.serving.stream import Completion

_FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counts what a server does; each server has a registry of its own."""

    def __init__(self, models: Callable[[], Sequence[ServedModel]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineGauges(models))
        model, to = ("model",), self._registry
        self._requests = Counter(
            "hetero_kv_requests", "HTTP requests by route and status", ("route", "status"), registry=to
        )
        self._prompt = Counter("hetero_kv_prompt_tokens", "Tokens of prompts, cached ones included", model, registry=to)
        self._cached = Counter(
            "hetero_kv_cached_tokens", "Tokens of prompts that were in the cache", model, registry=to
        )
        self._tokens = Counter("hetero_kv_answer_tokens", "Tokens of answers", model, registry=to)
        self._drafted = Counter("hetero_kv_drafted_tokens", "Guessed tokens that were verified", model, registry=to)
        self._accepted = Counter("hetero_kv_accepted_tokens", "Guessed tokens that were right", model, registry=to)
        self._answers = Counter("hetero_kv_answers", "Answers by how they ended", ("model", "reason"), registry=to)
        self._first = Histogram(
            "hetero_kv_first_token_seconds", "From the engine's start of a request to its first token",
            model, registry=to, buckets=_FIRST_TOKEN_S,
        )  # fmt: skip
        self._gap = Histogram(
            "hetero_kv_answer_seconds_per_token", "Mean time of an answer's tokens behind the first", model,
            registry=to, buckets=_GAP_S,
        )  # fmt: skip
        self._prefill_speed = Counter("hetero_kv_prefill_seconds", "Time to first tokens, in all", model, registry=to)
        self.began = time.time()

    def request(self, route: str, status: int) -> None:
        """Count an HTTP request."""
        self._requests.labels(route, str(status)).inc()

    def token(self, served: ServedModel) -> None:
        """Count a token of an answer."""
        self._tokens.labels(served.id).inc()

    def cancelled(self, served: ServedModel) -> None:
        """Count an answer that was cancelled."""
        self._answers.labels(served.id, "cancelled").inc()

    def completed(self, served: ServedModel, completion: Completion) -> None:
        """Count a complete answer."""
        name = served.id
        self._answers.labels(name, completion.finish_reason).inc()
        self._prompt.labels(name).inc(completion.prompt_tokens)
        self._cached.labels(name).inc(completion.cached_tokens)
        self._drafted.labels(name).inc(completion.drafted_tokens)
        self._accepted.labels(name).inc(completion.accepted_tokens)
        if completion.first_token_s is not None:
            self._first.labels(name).observe(completion.first_token_s)
            self._prefill_speed.labels(name).inc(completion.first_token_s)
            behind = len(completion.pieces) - 1
            if behind:
                self._gap.labels(name).observe((completion.total_s - completion.first_token_s) / behind)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineGauges:
    """Gauges of the engines at the moment of a scrape."""

    def __init__(self, models: Callable[[], Sequence[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterable[Any]:
        """See prometheus_client's collectors."""
        return self._families()

    def _families(self) -> Iterator[Any]:
        requests = GaugeMetricFamily("hetero_kv_rows", "Requests by state", labels=("model", "state"))
        free = GaugeMetricFamily("hetero_kv_free_tokens", "Tokens for which there are free blocks", labels=("model",))
        capacity = GaugeMetricFamily("hetero_kv_capacity_tokens", "Tokens that the store takes", labels=("model",))
        dram = GaugeMetricFamily("hetero_kv_dram_bytes", "DRAM of blocks that were ever used", labels=("model",))
        kept = GaugeMetricFamily("hetero_kv_kept_prefixes", "Sequences of ended requests", labels=("model",))
        failures = CounterMetricFamily(
            "hetero_kv_context_failures", "Saved contexts that could not be looked up, fetched, loaded or stored",
            labels=("model",),
        )  # fmt: skip
        for served in self._models():
            status = served.engine.status()
            states = [each.state for each in status.requests]
            for state in ("waiting", "prefilling", "answering"):
                requests.add_metric((served.id, state), states.count(state))
            requests.add_metric((served.id, "queued"), served.gate.waiting)
            name = (served.id,)
            free.add_metric(name, status.free)
            capacity.add_metric(name, status.capacity)
            dram.add_metric(name, status.dram_bytes)
            kept.add_metric(name, status.kept_prefixes)
            failures.add_metric(name, status.context_failures)
        yield from (requests, free, capacity, dram, kept, failures)
