"""The request router of Ray Serve that sends a request where it costs least.

Ray takes this module's code to other processes by value, so that what they share lies in `placement`.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from hetero_kv.server.cluster.messages import RemoteRequest
from hetero_kv.server.cluster.placement import placement_of


class PrefixRouter(RequestRouter):
    """Sends requests to the replicas that have the beginnings of their prompts, unless others are sooner done.

    Ray makes one in every process that has a handle of the deployment, and calls it in a thread of its own.
    """

    def initialize_state(self, report_s: float) -> None:
        """See Ray Serve.

        Args:
            report_s: seconds between two reports of a replica.
        """
        self._placement = placement_of(self._deployment_id.app_name, self._deployment_id.name, report_s)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See Ray Serve: the replicas, the best first."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(request, RemoteRequest) or not candidate_replicas:
            return [[each] for each in random.sample(candidate_replicas, len(candidate_replicas))]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        return [[by_name[name]] for name in self._placement.ranked(request, by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """See Ray Serve."""
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, RemoteRequest):
            self._placement.went(request, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See Ray Serve: called whenever there are other replicas, or new reports."""
        super().update_replicas(replicas)
        self._placement.learn({each.replica_id.unique_id: each.routing_stats for each in replicas})
