"""The application that Ray Serve deploys: the ingress, and the replicas of the engines behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from hetero_kv.errors import ConfigError
from hetero_kv.server.checked_flags import checked
from hetero_kv.server.cluster.autoscaling import replicas_for_load
from hetero_kv.server.cluster.engine_replica import EngineReplica
from hetero_kv.server.cluster.ingress import Ingress
from hetero_kv.server.cluster.prefix_router import PrefixRouter
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.command import add_flags
from hetero_kv.server.plan import ServerPlan
from hetero_kv.settings.flags import FlagParser

#: Seconds that a replica gets to save its contexts, beyond those in which its answers end.
_SAVING_S = 120.0
#: Requests at the ingress at a time; its gates bound what is computed and what waits.
_MOST_REQUESTS = 10_000


class EngineDeployment(EngineReplica):
    """A replica under the name that Ray Serve gives it."""

    def __init__(self, plan: ServerPlan) -> None:
        super().__init__(plan, serve.get_replica_context().replica_id.unique_id)


def application_of(
    plan: ServerPlan, cluster: ClusterSettings, router: RequestRouterConfig | None = None
) -> Application:
    """The application of a plan.

    Args:
        router: how requests find their replicas; None: they go where they cost least.
    """
    router = router or RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"report_s": cluster.report_s},
        request_routing_stats_period_s=cluster.report_s,
        request_routing_stats_timeout_s=max(5.0, cluster.report_s),
    )
    number: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.replicas == "auto":
        policy = AutoscalingPolicy(policy_function=replicas_for_load)
        bounds = {"min_replicas": 1, "max_replicas": cluster.most_replicas}
        number = {"autoscaling_config": AutoscalingConfig(**bounds, policy=policy)}
    engines = _replicas("engines", plan, cluster, router, **number)
    prefill = None
    if cluster.prefill_replicas:
        prefill = _replicas("prefill", plan, cluster, router, num_replicas=cluster.prefill_replicas)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_wait_loop_s=0.5,
        # Answers end by themselves before.
        graceful_shutdown_timeout_s=plan.settings.shutdown_s + 10,
    )
    return ingress.bind(engines, plan, cluster, prefill)


def _replicas(
    name: str, plan: ServerPlan, cluster: ClusterSettings, router: RequestRouterConfig, **number: Any
) -> Application:
    """A deployment of replicas, as many as `number` says."""
    settings = plan.settings
    deployment = serve.deployment(
        EngineDeployment,
        name=name,
        ray_actor_options={"num_cpus": cluster.replica_cpus, "num_gpus": cluster.replica_gpus},
        # The gates of the ingress bound what comes, and an engine queues.
        max_ongoing_requests=settings.max_batch + settings.queue_length,
        request_router_config=router,
        # A model that cannot be loaded fails every time.
        max_constructor_retry_count=2,
        health_check_period_s=min(10.0, cluster.silent_s / 2),
        health_check_timeout_s=cluster.silent_s,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.shutdown_s + _SAVING_S,
        **number,
    )
    return deployment.bind(plan)


def app(arguments: Mapping[str, Any]) -> Application:
    """The application by the flags of `hetero-kv serve`, for `serve run` and the `args` of Ray Serve's files.

    Args:
        arguments: flag without dashes -> its value, a list for one that is given several times.

    Raises ConfigError for an unknown flag, a value that is not valid, and an address, which Ray Serve's `http_options`
    have; and if there are no keys, unless `insecure`.
    """
    for name in {"host", "port"} & arguments.keys():
        raise ConfigError(f"{name} has no effect here; give it in Ray Serve's http_options, and leave it out of args")
    parser = FlagParser("hetero-kv serve", "")
    add_flags(parser)
    flags = parser.parse(parser.words({**arguments, "cluster": True}))
    found = checked(flags, listens=False)
    assert found.cluster is not None
    return application_of(ServerPlan.of(flags, found), found.cluster)
