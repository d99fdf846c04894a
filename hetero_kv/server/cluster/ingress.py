"""The ingress of a cluster: the routes of a server, whose engines are elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from hetero_kv.server.app import application
from hetero_kv.server.cluster.messages import ModelFacts
from hetero_kv.server.cluster.remote_engine import RemoteEngine
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.host import Host
from hetero_kv.server.launch import log_to_standard_error
from hetero_kv.server.limits import Gate
from hetero_kv.server.plan import ServerPlan
from hetero_kv.server.served import ServedModel

_logger = logging.getLogger(__name__)


class Ingress:
    """Has the routes of one machine's server, tokenizers and templates, and no weights.

    Args:
        engines: the handle of the replicas' deployment.
        prefill: that of the replicas that compute long prompts for the others; None without any.
    """

    def __init__(
        self, engines: DeploymentHandle, plan: ServerPlan, cluster: ClusterSettings,
        prefill: DeploymentHandle | None = None,
    ) -> None:  # fmt: skip
        log_to_standard_error()
        self._engines, self._prefill, self._plan, self._cluster = engines, prefill, plan, cluster
        self._host: Host | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, once there is a replica; see `ray.serve.ingress`."""
        facts: Sequence[ModelFacts] = await self._engines.facts.remote()
        self._host = self._plan.host([self._served(each) for each in facts])
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._host))
        return application(self._host, origins=self._plan.origins)

    def _served(self, facts: ModelFacts) -> ServedModel:
        settings, name = self._plan.settings, f"{facts.model}:{facts.recipe}"
        engine = RemoteEngine(name, facts, self._engines, self._cluster, self._prefill)
        gate = Gate(settings.max_batch, settings.queue_length, settings.queue_s)
        return ServedModel(facts.model, facts.recipe, facts.tokenizer, facts.context_length, engine, gate)

    async def _watch(self, host: Host) -> None:
        """Admit as many requests at a time as the replicas that there are answer."""
        while True:
            try:
                for each in host.models.all:
                    each.gate.resize(max(self._plan.settings.max_batch, each.engine.status().max_batch))
            except Exception:
                # A fault of ours; requests go on, as many at a time as before.
                _logger.exception("the gates do not follow the number of replicas")
            await asyncio.sleep(self._cluster.report_s)

    def lengths(self) -> dict[str, int]:
        """See `ServedModels.lengths`."""
        assert self._host is not None
        return self._host.models.lengths

    async def stop_answers(self, seconds: float) -> None:
        """End all answers in so many seconds, with the error that the server stops."""
        assert self._host is not None
        asyncio.get_running_loop().call_later(seconds, self._host.stop_answers)
