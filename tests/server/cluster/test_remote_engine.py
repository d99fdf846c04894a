"""The engine of an ingress, before replicas that are a script."""

from __future__ import annotations

import asyncio

import pytest

from hetero_kv import SamplingParams
from hetero_kv.server.cluster.messages import ModelFacts, NextPieces, Taken
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.errors import ApiError
from hetero_kv.serving.grammar import GrammarMask, GrammarText
from hetero_kv.serving.stream import Completion, Piece

pytest.importorskip("ray")

import grpc
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RequestCancelledError

from hetero_kv.server.cluster.remote_engine import RemoteEngine

FACTS = ModelFacts("tiny", "dense", None, 2048, 288, 1_000_000, frozenset([0]), {"off": None})
DONE = Completion("abcd", (), "max_new_tokens", None, 3, 0, None, 1.0)


def pieces(*tokens):
    return NextPieces([Piece(token, chr(token)) for token in tokens])


def broken(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


class Replicas:
    """A handle of replicas whose n-th answer is the n-th script: messages, and an error that ends it."""

    app_name = deployment_name = "scripted"

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.options_of, self.requests, self.cancelled = [], [], 0

    def options(self, **options):
        self.options_of.append(options)
        return self

    @property
    def generate(self):
        return self

    prefill = generate

    def remote(self, request):
        self.requests.append(request)
        replicas, script = self, iter(self.scripts.pop(0))

        class Response:
            async def __anext__(self):
                found = next(script, StopAsyncIteration())
                if isinstance(found, BaseException):
                    raise found
                return await found if asyncio.iscoroutine(found) else found

            def cancel(self):
                replicas.cancelled += 1

        return Response()


def answer(replicas, prompt=(1, 2, 3), prefill=None, **sampling):
    async def read():
        settings = ClusterSettings(prefill_tokens=1)
        engine = RemoteEngine("tiny:dense", FACTS, replicas, settings, prefill)
        return await engine.generate(prompt, SamplingParams(**{"max_new_tokens": 4, **sampling}))

    return asyncio.run(read())


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        broken(grpc.StatusCode.UNAVAILABLE),
        broken(grpc.StatusCode.INTERNAL),
        broken(grpc.StatusCode.CANCELLED),
        StopAsyncIteration(),
        asyncio.CancelledError(),
        RequestCancelledError(),
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_an_answer_goes_on_behind_its_last_token_however_the_replica_is_lost(error, sampling):
    replicas = Replicas([Taken("one"), pieces(97, 98), error], [Taken("two"), pieces(99, 100), DONE])
    found = answer(replicas, **sampling)
    assert (found.tokens, found.text) == ((97, 98, 99, 100), "abcd")
    first, second = replicas.requests
    assert second.arguments["answered"] == [97, 98]
    # The random numbers go on too.
    assert first.sampling.is_greedy or (first.sampling.seed is not None and first.sampling.seed == second.sampling.seed)
    assert replicas.cancelled == 1


def test_an_answer_that_four_replicas_lose_is_an_error_of_the_server():
    with pytest.raises(
        ApiError, match=r"the answer was lost: replica one is gone \(AioRpcError\); ask again"
    ) as raised:
        answer(Replicas(*[[Taken("one"), broken(grpc.StatusCode.UNAVAILABLE)] for _ in range(4)]))
    assert (raised.value.status, raised.value.code) == (503, "replica_lost")


@pytest.mark.parametrize(
    ("prompt", "sampling", "is_direct"),
    [
        (3, {}, True),
        (900_000, {}, False),
        (3, {"max_new_tokens": 200_000}, False),
        (3, {"mask": GrammarMask.__new__(GrammarMask)}, False),
    ],
    ids=["short", "long prompt", "long answer", "long grammar"],
)
def test_what_may_not_fit_into_a_message_of_grpc_goes_through_objects(prompt, sampling, is_direct):
    if "mask" in sampling:
        sampling["mask"].grammar = GrammarText("the regular expression", "grammar_from_regex", "a" * 5_000_000)
    replicas = Replicas([Taken("one"), pieces(97), DONE])
    answer(replicas, [1] * prompt, **sampling)
    assert replicas.options_of[-1]["_by_reference"] is not is_direct


@pytest.mark.parametrize(
    "error", [OSError("no space left"), broken(grpc.StatusCode.INTERNAL), asyncio.CancelledError()]
)
def test_what_no_prefill_replica_computes_the_one_that_answers_does(error):
    replicas = Replicas([Taken("one"), pieces(97, 98, 99, 100), DONE])
    assert answer(replicas, prefill=Replicas([Taken("first"), error])).text == "abcd"
    assert replicas.requests[0].routed.stored_tokens == 0


def test_a_cancelled_answer_is_cancelled_at_its_replica_and_goes_on_nowhere():
    class Endless:
        def __iter__(self):
            yield Taken("one")
            yield pieces(97)
            yield asyncio.sleep(60)

    replicas = Replicas(Endless())

    async def read():
        stream = RemoteEngine("tiny:dense", FACTS, replicas, ClusterSettings()).generate([1, 2, 3])
        async for _ in stream:
            stream.cancel()
        return await stream

    found = asyncio.run(read())
    assert (found.finish_reason, found.tokens) == ("stopped", (97,))
    assert (len(replicas.requests), replicas.cancelled) == (1, 1)
