"""Starts a cluster for `hetero-kv serve --cluster`, and ends it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from hetero_kv.errors import ConfigError
from hetero_kv.server.cluster.application import application_of
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.launch import announce, bound, log_to_standard_error
from hetero_kv.server.plan import ServerPlan

#: The application's name in Ray Serve.
NAME = "hetero-kv"
#: Of a cluster on one machine, bytes.
_OBJECT_STORE = 200_000_000
# Of the processes of that cluster: Ray's proxy gets answers by gRPC, in half the CPU time of objects, of any size.
_ENVIRONMENT = {"RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}
# How long the ingress may take to answer that it is told, seconds.
_TOLD_S = 10.0


def serve_cluster(plan: ServerPlan, cluster: ClusterSettings, router: RequestRouterConfig | None = None) -> int:
    """Serve by replicas until SIGINT or SIGTERM; returns the exit status.

    Joins the Ray cluster that RAY_ADDRESS names; without it, starts one on this machine, which ends with the server.

    Args:
        router: as of `application_of`.

    Raises HeteroKVError for a port in use, and for a cluster or models that do not start.
    """
    log_to_standard_error()
    settings = plan.settings
    # Ray's proxies bind it later; a port in use shows at once.
    with bound(settings) as listener:
        address = listener.getsockname()
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    joins = bool(os.environ.get("RAY_ADDRESS"))
    if not joins:
        os.environ.update({**_ENVIRONMENT, **os.environ})
    try:
        ray.init(logging_level="WARNING", **({} if joins else _local(cluster)))
        serve.start(
            http_options={"host": settings.host, "port": address[1], "keep_alive_timeout_s": 30},
            proxy_location="EveryNode" if joins else "HeadOnly",
        )
        try:
            ingress = serve.run(application_of(plan, cluster, router), name=NAME, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise ConfigError(f"the cluster did not start ({error}); the lines above say why") from error
        lengths = ingress.lengths.remote().result()
        # Until here a signal ends the wait for the models, and behind it a second one that for the answers.
        before = [(each, signal.signal(each, stop)) for each in (signal.SIGINT, signal.SIGTERM)]
        announce(address, lengths)
        stopping.wait()
        for each, handler in before:
            signal.signal(each, handler)
        ingress.broadcast("stop_answers", settings.shutdown_s).results(timeout_s=_TOLD_S)
        # The proxies take no new requests, and those under way get their time.
        serve.delete(NAME)
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def _local(cluster: ClusterSettings) -> dict[str, Any]:
    """How Ray starts on this machine alone."""
    replicas = cluster.most_replicas if cluster.replicas == "auto" else cluster.replicas
    count = replicas + cluster.prefill_replicas
    return {
        # No other cluster that happens to run here.
        "address": "local",
        # Ray refuses to start what it has no cores for; here the user says how many replicas share them.
        "num_cpus": max(1, round(count * cluster.replica_cpus)),
        "include_dashboard": False,
        # Tokens and answers go through it, no keys and values.
        "object_store_memory": _OBJECT_STORE,
        # Ray's 15 is for jobs that anything else on the machine may delay.
        "_system_config": {"worker_niceness": 0},
    }
