"""A replica and what the ingress knows of it, without Ray between them."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from hetero_kv import SamplingParams
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.server.checked_flags import checked
from hetero_kv.server.cluster.arriving_result import ArrivingResult
from hetero_kv.server.cluster.autoscaling import LOAD
from hetero_kv.server.cluster.engine_replica import EngineReplica
from hetero_kv.server.cluster.messages import NextPieces, RemoteRequest, Taken
from hetero_kv.server.cluster.placement import Placement
from hetero_kv.server.command import add_flags
from hetero_kv.server.plan import ServerPlan
from hetero_kv.serving.cluster.prefix_hashes import block_hashes
from hetero_kv.serving.cluster.routing import RoutedRequest
from hetero_kv.serving.grammar import GrammarText
from hetero_kv.serving.stream import Completion, ResultStream
from hetero_kv.settings.flags import FlagParser
from tests.server.cluster.tiny_folder import CAPACITY, tiny_folder
from tests.support.slow_variants import with_few

MODEL = "tiny:dense"


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    parser = FlagParser("hetero-kv serve", "")
    add_flags(parser)
    model = tiny_folder(tmp_path_factory.mktemp("replica") / "tiny")
    values = {
        "model": str(model),
        "config": ["dense"],
        "context_cache": "off",
        "max_seq_len": CAPACITY,
        "cluster": True,
        # A prompt is rounded otherwise than the same tokens of an answer, and in bfloat16 by far.
        "dtype": "float32",
    }
    flags = parser.parse(parser.words(values))
    found = EngineReplica(ServerPlan.of(flags, checked(flags)), "first")
    yield found
    found._open.close()


def remote_request(tokens, sampling=None, **fields):
    routed = RoutedRequest(len(tokens), block_hashes(tokens))
    sampling = sampling or SamplingParams(max_new_tokens=4, ignore_eos=True)
    return RemoteRequest(MODEL, np.array(tokens, np.int32), routed, fields.pop("arguments", {}), sampling, **fields)


def messages(replica, request, most=1000, on_message=lambda message: None):
    """What the replica sends, each of which `on_message` gets as it comes; the caller leaves after `most` of them."""

    async def read():
        found, source = [], await replica.generate(request)
        async for each in source:
            found.append(each)
            on_message(each)
            if len(found) == most:
                await source.aclose()
        return found

    return asyncio.run(read())


def result_of(sent):
    """The result at the ingress of what a replica sends."""
    stream = ResultStream(lambda _: None)
    result = ArrivingResult(stream)
    for message in sent[1:]:
        result.take(message)
    return stream.result(0)


def test_a_replica_sends_its_name_the_tokens_and_the_result(replica, monkeypatch):
    forward, has_come = replica._engines[MODEL]._scheduler.forward, threading.Event()
    decode = forward.decode
    # The first token is sent before there is a second one.
    monkeypatch.setattr(forward, "decode", lambda *arguments: has_come.wait(20) and decode(*arguments))
    taken, *bursts, result = messages(
        replica, remote_request([5, 6, 7]), on_message=lambda each: isinstance(each, NextPieces) and has_come.set()
    )
    assert taken == Taken("first")
    assert all(isinstance(each, NextPieces) for each in bursts)
    assert isinstance(result, Completion)
    assert len(bursts[0].pieces) == 1
    pieces = [piece for burst in bursts for piece in burst.pieces]
    assert len(pieces) == 4
    assert result.text.startswith("".join(piece.text for piece in pieces))
    # They are not sent a second time.
    assert result.pieces == ()


def test_an_error_of_the_request_comes_as_a_message(replica):
    _, error = messages(replica, remote_request([1] * (CAPACITY + 1)))
    assert isinstance(error, CacheFullError)


def test_a_grammar_holds_at_the_replica(replica):
    written = GrammarText("the regular expression", "grammar_from_regex", "(ab){3}")
    *_, result = messages(replica, remote_request([1, 2], SamplingParams(max_new_tokens=20), grammar=written))
    assert result.text == "ababab"


def test_who_leaves_cancels_the_answer(replica):
    engine = replica._engines[MODEL]
    messages(replica, remote_request([1, 2, 3], SamplingParams(max_new_tokens=1500, ignore_eos=True)), most=3)
    found = engine.generate([1], SamplingParams(max_new_tokens=1)).result(60)
    assert len(found.pieces) == 1
    assert engine.status().requests == ()


@pytest.mark.parametrize("bursts", with_few([3, 1]))
def test_an_answer_goes_on_at_another_replica_as_if_nothing_had_happened(replica, bursts):
    request = remote_request([4, 5, 6], SamplingParams(max_new_tokens=300, temperature=1.5, seed=7, ignore_eos=True))
    whole = result_of(messages(replica, request))
    stream = ResultStream(lambda _: None)
    result = ArrivingResult(stream)
    for message in messages(replica, request, most=1 + bursts)[1:]:
        result.take(message)
    assert bursts <= len(result.pieces) < 300
    again = result.going_on(request, "first")
    assert again.avoided == {"first"}
    for message in messages(replica, again)[1:]:
        result.take(message)
    found = stream.result(0)
    assert (found.tokens, found.text, found.finish_reason) == (whole.tokens, whole.text, whole.finish_reason)
    assert [piece.token for piece in stream] == list(whole.tokens)


def test_a_cancelled_answer_ends_as_it_is(replica):
    request = remote_request([4, 5, 6])
    stream = ResultStream(lambda _: None)
    result = ArrivingResult(stream)
    (sent,) = messages(replica, request, most=2)[1:]
    result.take(sent)
    result.cancelled(request)
    assert (stream.result(0).finish_reason, list(stream.result(0).pieces)) == ("stopped", list(sent.pieces))


def test_a_replica_is_known_by_its_reports_and_gets_the_prompts_that_it_has(replica):
    document = [7, 8, 9, 10] * 50
    messages(replica, remote_request(document))
    # The next one begins once the sequence is kept.
    messages(replica, remote_request([1]))
    stats = asyncio.run(replica.record_routing_stats())
    # It travels as plain data.
    stats = json.loads(json.dumps(stats))
    placement = Placement(0.5)
    placement.learn({"first": stats, "second": {**stats, MODEL: {**stats[MODEL], "report": other(stats)}}})
    for number in range(4):
        request = remote_request([*document, number])
        assert placement.ranked(request, ["second", "first"]) == ["first", "second"]
        assert placement.ended(request) == "first"
    avoiding = remote_request(document, avoided={"first"})
    assert placement.ranked(avoiding, ["second", "first"]) == ["second", "first"]
    assert [each.max_batch for each in placement.statuses(MODEL)] == [8, 8]
    assert 0 <= replica.record_autoscaling_stats()[LOAD] < 1
    replica.check_health()


def other(stats):
    """The report of a replica like it that has nothing in memory."""
    return {**stats[MODEL]["report"], "resident": []}


def test_a_report_of_another_version_leaves_its_replica_unknown(replica, caplog):
    placement = Placement(0.5)
    placement.learn({"first": {MODEL: {"report": {"from": "the future"}, "status": {}}}})
    assert "cannot be read" in caplog.text
    assert placement.ranked(remote_request([1, 2]), ["first"]) == ["first"]
    assert placement.statuses(MODEL) == []


def test_the_ingress_knows_the_ways_to_guess_without_asking_a_replica(replica):
    (facts,) = replica.facts()
    assert facts.ways == {"off": None, "lookup": None, "sparse": None, "auto": None}
