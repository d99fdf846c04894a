"""A replica: the engines of a server's models, in a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from hetero_kv.errors import HeteroKVError, is_out_of_memory
from hetero_kv.server.cluster.autoscaling import LOAD, load
from hetero_kv.server.cluster.messages import Alive, Message, ModelFacts, NextPieces, RemoteRequest, Taken
from hetero_kv.server.launch import log_to_standard_error
from hetero_kv.server.plan import ServerPlan
from hetero_kv.server.served import ServedModel
from hetero_kv.server.streaming import ticking
from hetero_kv.serving.cluster.reporter import Reporter
from hetero_kv.serving.engine import Engine
from hetero_kv.serving.status import EngineStatus
from hetero_kv.serving.stream import Completion, ResultStream

#: How often a replica says that it is alive while it has no token, seconds.
ALIVE_S = 0.5
#: Tokens of an answer are sent together that come within so many seconds for each answer at a time, but no longer than
#: the second number: a message takes Ray a millisecond and more, in which the engine's thread waits.
_PAUSE_S, _LONGEST_PAUSE_S = 0.025, 0.1
# The most tokens of a message, which with 20 alternatives each take some 0.3 MB.
_MOST_PIECES = 500


class EngineReplica:
    """Computes the answers to the requests that it is sent; each engine has a thread beside the event loop.

    Args:
        name: the replica's, by which routers know it.

    Raises HeteroKVError as `ModelsToLoad.load`.
    """

    def __init__(self, plan: ServerPlan, name: str) -> None:
        log_to_standard_error()
        self._name, self._stuck_s = name, plan.settings.stuck_s
        self._open = ExitStack()
        served = plan.models.load(plan.settings, plan.contexts, self._open)
        self._served = {each.id: each for each in served}
        self._engines = {each.id: each.engine for each in served if isinstance(each.engine, Engine)}
        self._reporters = {name: Reporter(engine) for name, engine in self._engines.items()}
        self._load, self._answers = 0.0, 0

    def facts(self) -> list[ModelFacts]:
        """The models that it has."""
        return [
            ModelFacts(
                each.model, each.recipe, each.tokenizer, each.context_length, each.engine.vocab_size,
                each.engine.max_seq_len, each.engine.ends, each.engine.ways,
            )
            for each in self._served.values()
        ]  # fmt: skip

    async def generate(self, request: RemoteRequest) -> AsyncIterator[Message]:
        """The messages of an answer. Closing the iterator early cancels the answer."""

        def ask(served: ServedModel) -> ResultStream[Any]:
            assert request.sampling is not None
            mask = None if request.grammar is None else served.grammars.mask(request.grammar)
            sampling = replace(request.sampling, mask=mask)
            return served.engine.generate(request.tokens.tolist(), sampling, **request.arguments)

        return self._messages(request, ask)

    async def prefill(self, request: RemoteRequest) -> AsyncIterator[Message]:
        """As `generate`; before the completion, the sequence is in the context folder."""
        last = Alive(None)
        async for message in await self.generate(request):
            if isinstance(message, Alive):
                last = message
            if isinstance(message, Completion):
                saving = asyncio.create_task(asyncio.to_thread(self._engines[request.model].save_kept))
                while not (await asyncio.wait({saving}, timeout=ALIVE_S))[0]:
                    yield last
                await saving
            yield message

    async def attended(self, request: RemoteRequest) -> AsyncIterator[Message]:
        """The messages of what a token attended to, as of `generate`."""
        return self._messages(
            request, lambda served: served.engine.attended(request.tokens.tolist(), **request.arguments)
        )

    async def _messages(
        self, request: RemoteRequest, ask: Callable[[ServedModel], ResultStream[Any]]
    ) -> AsyncGenerator[Message]:
        yield Taken(self._name)
        stream = None
        self._answers += 1
        try:
            stream = ask(self._served[request.model])
            async for pieces in ticking(stream.bursts(self._pause_s), ALIVE_S):
                if pieces is None:
                    yield Alive(stream.progress)
                    continue
                for first in range(0, len(pieces), _MOST_PIECES):
                    yield NextPieces(pieces[first : first + _MOST_PIECES])
            result = await stream
            # Its tokens have been sent.
            yield replace(result, pieces=()) if isinstance(result, Completion) else result
        except Exception as error:
            if not isinstance(error, HeteroKVError) and not is_out_of_memory(error):
                # A fault of ours, which Ray logs here.
                raise
            # As a value, because Ray would put a traceback into its text.
            yield error
        finally:
            self._answers -= 1
            if stream is not None and not stream.is_done:
                stream.cancel()

    def _pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, _PAUSE_S * self._answers)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers and the ingress know of the replica, in plain types, by model; see Ray Serve."""
        return await asyncio.to_thread(self._stats)

    def _stats(self) -> dict[str, Any]:
        reports = {name: reporter.report() for name, reporter in self._reporters.items()}
        self._load = sum(map(load, reports.values()))
        return {
            name: {"report": report.to_dict(), "status": _plain(self._engines[name].status())}
            for name, report in reports.items()
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How busy the replica was at its last report, for the autoscaling policy; see Ray Serve."""
        return {LOAD: self._load}

    def check_health(self) -> None:
        """Raise RuntimeError if an engine is closed or stuck, so that Ray replaces the replica; see Ray Serve."""
        for name, engine in self._engines.items():
            status = engine.status()
            if not status.is_open or status.is_stuck(self._stuck_s):
                raise RuntimeError(f"the engine of {name} is closed or stuck")

    def __del__(self) -> None:
        """Ray calls it when the replica has no request any more: kept sequences go to the context folder."""
        self._open.close()


def _plain(status: EngineStatus) -> dict[str, Any]:
    """A status of types that a process without this package knows."""
    return {**asdict(status), "requests": [tuple(each) for each in status.requests]}
