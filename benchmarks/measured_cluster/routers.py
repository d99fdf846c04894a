"""Ray's routers before our replicas, beside ours.

All of them pass on what replicas report, by which the ingress admits as many requests at a time as all replicas answer;
ours, `PrefixRouter`, does so by itself. None of Ray's chooses by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from hetero_kv.server.cluster.messages import RemoteRequest
from hetero_kv.server.cluster.placement import placement_of
from hetero_kv.server.cluster.settings import ClusterSettings

# The first character that stands for a token: none before it is a surrogate.
_FIRST = 0x10000
_REPORT_S = ClusterSettings().report_s


class _Reported(RequestRouter):
    """Tells the ingress what replicas report."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See Ray Serve."""
        super().update_replicas(replicas)
        place = placement_of(self._deployment_id.app_name, self._deployment_id.name, _REPORT_S)
        place.learn({each.replica_id.unique_id: each.routing_stats for each in replicas})


class RoundRobin(_Reported, RoundRobinRouter):
    """Ray's `ray.serve.experimental.round_robin_router.RoundRobinRouter`."""


class PowerOfTwo(_Reported, PowerOfTwoChoicesRequestRouter):
    """Ray's default, `PowerOfTwoChoicesRequestRouter`."""


class PrefixCacheAffinity(_Reported, PrefixCacheAffinityRouter):
    """Ray's `PrefixCacheAffinityRouter`, with a character for each token of a prompt.

    `ray.serve.llm`, which has it publicly, cannot be imported without vLLM or SGLang; the class there is this one under
    another name. It looks for texts in attributes `prompt` or `messages`, which our requests have not: a replica gets
    tokens.
    """

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        request = pending_request.args[0]
        assert isinstance(request, RemoteRequest)
        return "".join(chr(_FIRST + token) for token in request.tokens.tolist())


#: Name -> the class, None for ours, and its settings.
_CLASSES: Mapping[str, tuple[type[RequestRouter] | None, Mapping[str, Any]]] = {
    "ours": (None, {}),
    "PrefixCacheAffinityRouter": (PrefixCacheAffinity, {}),
    "PrefixCacheAffinityRouter, threshold 4": (PrefixCacheAffinity, {"imbalanced_threshold": 4}),
    "power of two choices": (PowerOfTwo, {}),
    "round robin": (RoundRobin, {}),
}
ROUTERS = tuple(_CLASSES)
"""The routers' names."""


def router_of(name: str) -> RequestRouterConfig | None:
    """The router of that name; None for the one that a cluster has."""
    found, settings = _CLASSES[name]
    if found is None:
        return None
    return RequestRouterConfig(
        request_router_class=found,
        request_router_kwargs=dict(settings),
        request_routing_stats_period_s=_REPORT_S,
        request_routing_stats_timeout_s=5.0,
    )
