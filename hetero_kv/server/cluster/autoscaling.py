"""How many replicas a cluster should have, by the tokens and requests that wait for them.

Ray takes this module's code into its controller by value, so it imports nothing of the package at run time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_kv.serving.cluster.replica_report import ReplicaReport

#: The name of the metric that a replica records.
LOAD = "hetero_kv_load"
#: The load of a replica that is as busy as it should be: some rows are free for the next requests.
_WISHED = 0.75
#: Prompts that take so long to compute are as much load as all rows together, seconds.
_FULL_S = 30.0
#: Speed of prompts before any has passed, tokens a second.
_TOKENS_PER_S = 500.0


def load(report: ReplicaReport) -> float:
    """How busy a replica is: 1 where all rows are taken, or 30 s of prompts wait; more with more of either."""
    queue_s = report.queued_tokens / (report.prefill_tokens_per_s or _TOKENS_PER_S)
    return max((report.rows + report.waiting) / report.row_limit, queue_s / _FULL_S)


def replicas_for_load(context: Any) -> tuple[float, dict[str, Any]]:
    """An autoscaling policy of Ray Serve: so many replicas that each is three quarters busy.

    Delays, factors and bounds are those of the deployment's `autoscaling_config`.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(loads.values()) / _WISHED)), {}
