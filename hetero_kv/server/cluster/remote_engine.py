"""The engines of a cluster's replicas, as one engine of a server."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import pickle
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from hetero_kv.errors import HeteroKVError
from hetero_kv.server.cluster.arriving_result import ArrivingResult
from hetero_kv.server.cluster.messages import Alive, Message, ModelFacts, RemoteRequest, Taken
from hetero_kv.server.cluster.placement import placement_of
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.errors import ApiError
from hetero_kv.serving.attended import Attended
from hetero_kv.serving.cluster.prefix_hashes import block_hashes
from hetero_kv.serving.cluster.routing import RoutedRequest
from hetero_kv.serving.grammar import GrammarMask
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.status import EngineStatus, together
from hetero_kv.serving.stream import Completion, ResultStream, Stream

_logger = logging.getLogger(__name__)
#: How many replicas are tried for one request.
_ATTEMPTS = 4
#: Requests of more bytes, or for longer answers, go through Ray's objects: a message of gRPC has at most 4 MB.
_MOST_BYTES, _LONGEST_ANSWER = 3_000_000, 100_000


class ReplicaLostError(HeteroKVError):
    """A replica has died, or is silent."""


class RemoteEngine:
    """Answers by replicas, as `hetero_kv.server.served.ServedEngine` has it; for one event loop.

    An answer whose replica dies goes on at another one, behind the last token that came. Its random numbers go on too,
    because an answer without a seed gets one here. Of what the replicas round otherwise, later tokens may be others
    than they would have been.

    Args:
        model: the model's id.
        facts: of the model.
        handle: of the replicas' deployment.
        prefill: of the deployment of those that compute long prompts for the others; None without any.
    """

    def __init__(
        self, model: str, facts: ModelFacts, handle: DeploymentHandle, settings: ClusterSettings,
        prefill: DeploymentHandle | None = None,
    ) -> None:  # fmt: skip
        self._model, self._facts, self._settings = model, facts, settings
        self._handle, self._prefill = handle, prefill
        self._placement = placement_of(handle.app_name, handle.deployment_name, settings.report_s)
        if prefill is not None:
            self._prefill_placement = placement_of(prefill.app_name, prefill.deployment_name, settings.report_s)
        # The event loop itself keeps no reference.
        self._tasks: dict[ResultStream[Any], asyncio.Task[None]] = {}

    @property
    def vocab_size(self) -> int:
        """See `Engine`."""
        return self._facts.vocab_size

    @property
    def max_seq_len(self) -> int:
        """See `Engine`; that of the replica that told it."""
        return self._facts.max_seq_len

    @property
    def ends(self) -> frozenset[int]:
        """See `Engine`."""
        return self._facts.ends

    @property
    def ways(self) -> Mapping[str, str | None]:
        """See `Engine`; those of the replica that told them."""
        return self._facts.ways

    def status(self) -> EngineStatus:
        """All replicas as one engine: it is idle as long as the one that computed last."""
        return together(self._placement.statuses(self._model))

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, *, question: int | None = None,
        priority: int = 0, markers: Mapping[int, str] | None = None, reuses: bool = True,
        speculation: str | None = None, tenant: str = "",
    ) -> Stream:  # fmt: skip
        """See `Engine`. What that raises, the stream raises."""
        params = sampling or SamplingParams()
        if params.seed is None and not params.is_greedy:
            params = replace(params, seed=secrets.randbits(63))
        mask = params.mask
        if mask is not None and not isinstance(mask, GrammarMask):
            raise HeteroKVError("a mask that is no grammar cannot be sent to a replica; give a grammar")
        tokens = np.asarray(prompt, np.int32)
        request = RemoteRequest(
            self._model,
            tokens,
            RoutedRequest(
                len(tokens), block_hashes(tokens, salt=tenant), min(params.max_new_tokens, RoutedRequest.answer_tokens)
            ),
            {
                "question": question,
                "priority": priority,
                "markers": markers,
                "reuses": reuses,
                "speculation": speculation,
                "tenant": tenant,
            },
            replace(params, mask=None),
            None if mask is None else mask.grammar,
        )
        return self._followed("generate", request)

    def attended(
        self, tokens: Sequence[int], position: int, *, prompt_tokens: int | None = None,
        bins: int | Sequence[int] = 256, priority: int = 0, tenant: str = "",
    ) -> ResultStream[Attended]:  # fmt: skip
        """See `Engine`. What that raises, the stream raises."""
        known = np.asarray(tokens, np.int32)
        arguments = {
            "position": position,
            "prompt_tokens": prompt_tokens,
            "bins": bins,
            "priority": priority,
            "tenant": tenant,
        }
        routed = RoutedRequest(position, block_hashes(known[:position], salt=tenant), 1)
        return self._followed("attended", RemoteRequest(self._model, known, routed, arguments))

    def _followed(self, method: str, request: RemoteRequest) -> ResultStream[Any]:
        stream: ResultStream[Any] = ResultStream(self._cancel)
        # Of several calls in the context of one HTTP request, Ray's routers lose all but one.
        task = asyncio.get_running_loop().create_task(
            self._follow(method, request, stream), context=contextvars.Context()
        )
        self._tasks[stream] = task
        task.add_done_callback(lambda _: self._end(stream))
        return stream

    def _end(self, stream: ResultStream[Any]) -> None:
        del self._tasks[stream]
        if not stream.is_done:
            # Cancelled before its first step.
            stream.fail(HeteroKVError("the request was cancelled"))

    def _cancel(self, stream: ResultStream[Any]) -> None:
        task = self._tasks.get(stream)
        if task is not None:
            task.cancel()

    async def _follow(self, method: str, request: RemoteRequest, stream: ResultStream[Any]) -> None:
        """Pass on what replicas send, until there is a result or an error."""
        result = ArrivingResult(stream)
        try:
            request = await self._prefilled(method, request, stream)
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    async with aclosing(self._messages(self._handle, method, request)) as messages:
                        async for message in messages:
                            result.take(message)
                    return
                except ReplicaLostError as error:
                    _logger.warning("%s; %d tokens of the answer have come", error, len(result.pieces))
                    if attempt == _ATTEMPTS:
                        raise
                    request = result.going_on(request, self._placement.ended(request))
        except asyncio.CancelledError:
            result.cancelled(request)
            raise
        except Exception as error:
            stream.fail(_api_error(error))
        finally:
            self._placement.ended(request)

    async def _prefilled(self, method: str, request: RemoteRequest, stream: ResultStream[Any]) -> RemoteRequest:
        """Let a prefill replica compute a long prompt that is new, and save it where the others find it."""
        reuses = method == "generate" and request.arguments["reuses"]
        if self._prefill is None or not reuses or self._placement.missing(request) < self._settings.prefill_tokens:
            return request
        assert request.sampling is not None
        first = replace(request, sampling=replace(request.sampling, max_new_tokens=1), grammar=None)
        try:
            async with aclosing(self._messages(self._prefill, "prefill", first)) as messages:
                async for message in messages:
                    if isinstance(message, Alive):
                        stream.progress = message.progress
                    elif isinstance(message, Exception):
                        raise message
        except Exception as error:
            _logger.warning("no prefill replica has computed a prompt (%s); the one that answers does", error)
            return request
        finally:
            self._prefill_placement.ended(first)
        return replace(request, routed=replace(request.routed, stored_tokens=len(request.tokens)))

    async def _messages(self, handle: DeploymentHandle, method: str, request: RemoteRequest) -> AsyncGenerator[Message]:
        """A replica's messages up to the last one. Raises ReplicaLostError if it dies or is silent before."""
        response = getattr(_way(handle, request), method).remote(request)
        name, is_over = "that was chosen", False
        try:
            while not is_over:
                message = await asyncio.wait_for(anext(response), self._settings.silent_s)
                is_over = isinstance(message, Completion | Attended | Exception)
                if isinstance(message, Taken):
                    name = message.replica
                else:
                    yield message
        except TimeoutError:
            raise ReplicaLostError(f"replica {name} said nothing for {self._settings.silent_s:g} s") from None
        except (RayActorError, RequestCancelledError, StopAsyncIteration, grpc.RpcError) as error:
            raise ReplicaLostError(f"replica {name} is gone ({type(error).__name__})") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Of gRPC: the replica has ended its side.
            raise ReplicaLostError(f"replica {name} has dropped the request") from error
        finally:
            if not is_over:
                response.cancel()


def _way(handle: DeploymentHandle, request: RemoteRequest) -> DeploymentHandle:
    """How a request goes to a replica: by gRPC, which takes half the CPU time of Ray's objects for each message."""
    sampling = request.sampling
    if sampling is None or sampling.max_new_tokens > _LONGEST_ANSWER or len(pickle.dumps(request)) > _MOST_BYTES:
        return handle.options(stream=True, _by_reference=True)
    return handle.options(
        stream=True, _by_reference=False, request_serialization="pickle", response_serialization="pickle"
    )


def _api_error(error: Exception) -> Exception:
    """An error for the client, from one of the cluster."""
    if isinstance(error, ReplicaLostError):
        return ApiError(
            503, f"the answer was lost: {error}; ask again", code="replica_lost", retry_after_s=5
        )  # fmt: skip
    if isinstance(error, RayServeException | RayError) and not isinstance(error, RayTaskError):
        _logger.error("a request failed", exc_info=error)
        return ApiError(503, "no replica of the cluster could answer; its log says why", code="no_replica")
    return error
