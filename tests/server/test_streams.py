"""Streams while prompts pass: signs of life, progress, clients that go away, queues, and errors in the middle."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from dataclasses import replace

import httpx2 as httpx
import pytest

from hetero_kv.server.limits import Gate
from tests.server.running import host_of, running, running_on_loop, tiny_served
from tests.serving.tiny_engine import call_before_parts

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = {"prompt": [5] * 700, "max_tokens": 60}


@pytest.fixture(scope="module")
def slow():
    """A tiny model of which prompts pass slowly, 50 tokens in a step of 0.1 seconds."""
    found = tiny_served(part=50, max_batch=2, kept_prefixes=0)
    call_before_parts(found.engine, lambda part: time.sleep(0.1))
    with found.engine:
        yield found


@pytest.fixture(scope="module")
def slow_address(slow, tmp_path_factory):
    """The address of its server."""
    with running(host_of(slow, folder=tmp_path_factory.mktemp("files"), ping_s=0.2)) as found:
        yield found


def wait_until(holds, seconds=20):
    """Wait until `holds()`; fails after some time."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)


def decoding_paused(served):
    """An event; until it is set, the model's engine decodes no token."""
    forward = served.engine._scheduler.forward
    decode, release = forward.decode, threading.Event()

    def paused(caches, tokens):
        release.wait(20)
        return decode(caches, tokens)

    forward.decode = paused
    return release


def test_a_stream_gives_signs_of_life_before_the_first_token(slow_address):
    with httpx.stream("POST", f"{slow_address}/v1/completions", json={**LONG, "stream": True}, timeout=30) as stream:
        lines = [line for line in stream.iter_lines() if line]
    first = next(number for number, line in enumerate(lines) if line.startswith("data:"))
    assert lines[0].startswith(":")
    assert first >= 2
    assert lines[-1] == "data: [DONE]"


def test_progress_is_told_where_it_is_asked_for(slow_address):
    fields = {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 2}
    payload = {**fields, "stream": True, "return_progress": True}
    with httpx.stream("POST", f"{slow_address}/v1/chat/completions", json=payload, timeout=30) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(told) >= 2
    assert [each["processed"] for each in told] == sorted(each["processed"] for each in told)
    assert all(0 < each["processed"] <= each["total"] for each in told)
    assert all(chunk["choices"] == [] for chunk in chunks if "prompt_progress" in chunk)


def requests_by_status(address):
    """Status -> how many requests for completions ended with it, by the server's metrics."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    found = [
        re.fullmatch(r'hetero_kv_requests_total{route="/v1/completions",status="(\d+)"} (\d+)\.0', each)
        for each in lines
    ]
    return Counter({int(each[1]): int(each[2]) for each in found if each})


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_while_its_prompt_passes_stops_the_work(slow, slow_address, is_streamed, caplog):
    before = requests_by_status(slow_address)
    caplog.set_level("INFO", "hetero_kv.server")
    with httpx.Client(base_url=slow_address) as client:
        if is_streamed:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}, timeout=30):
                wait_until(lambda: any(each.state == "prefilling" for each in slow.engine.status().requests))
        else:
            with pytest.raises(httpx.TimeoutException):
                client.post("/v1/completions", json=LONG, timeout=0.4)
    left = time.monotonic()
    wait_until(lambda: not slow.engine.status().requests)
    # The whole prompt would take 1.4 seconds.
    assert time.monotonic() - left < 1
    wait_until(lambda: requests_by_status(slow_address) - before == {499: 1})
    (line,) = [each.getMessage() for each in caplog.records if "path=/v1/completions" in each.getMessage()]
    assert "status=499" in line


def test_a_client_that_leaves_while_it_waits_gives_its_place_up(slow, slow_address):
    with (
        httpx.Client(base_url=slow_address) as client,
        client.stream("POST", "/v1/completions", json={**LONG, "n": 4, "stream": True}, timeout=30),
    ):
        pass
    wait_until(lambda: not slow.engine.status().requests)
    wait_until(lambda: slow.gate.waiting == 0)
    assert httpx.post(f"{slow_address}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_prompt_does_not_hold_up_an_answer(slow, slow_address):
    times = []

    def read():
        payload = {"prompt": [7, 8, 9], "max_tokens": 40, "ignore_eos": True, "stream": True, "logprobs": 0}
        with httpx.stream("POST", f"{slow_address}/v1/completions", json=payload, timeout=30) as stream:
            times.extend(time.monotonic() for line in stream.iter_lines() if line.startswith("data: {"))

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(slow.engine.status().requests) == 1)
    began = time.monotonic()
    httpx.post(f"{slow_address}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=30)
    reader.join()
    during = [each for each in times if began < each]
    # A token comes between any two parts of the prompt; there are 14.
    assert len(during) >= 10


def test_a_full_queue_refuses_with_a_time_to_come_again(tmp_path):
    found = replace(tiny_served(), gate=Gate(1, 1, 0.3))
    release = decoding_paused(found)
    payload = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
    with found.engine, running(host_of(found, folder=tmp_path)) as address:
        threads = [threading.Thread(target=httpx.post, args=(f"{address}/v1/completions",), kwargs={"json": payload})]
        threads[0].start()
        wait_until(lambda: len(found.engine.status().requests) == 1)
        # One waits, and gives up after 0.3 seconds; a third one does not fit.
        statuses = []
        waits = threading.Thread(
            target=lambda: statuses.append(
                httpx.post(f"{address}/v1/completions", json=payload, timeout=20).status_code
            )
        )
        waits.start()
        wait_until(lambda: found.gate.waiting == 1)
        refused = httpx.post(f"{address}/v1/completions", json=payload, timeout=20)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        waits.join()
        assert statuses == [429]
        release.set()
        threads[0].join()


def test_an_error_in_the_middle_ends_a_stream_in_the_apis_form(tmp_path):
    found = tiny_served()
    forward = found.engine._scheduler.forward
    decode, count = forward.decode, []

    def failing(caches, tokens):
        count.append(1)
        if len(count) > 3:
            raise ZeroDivisionError("secret detail")
        return decode(caches, tokens)

    forward.decode = failing
    with found.engine, running(host_of(found, folder=tmp_path)) as address:
        payload = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=payload) as stream:
            lines = [line for line in stream.iter_lines() if line]
        error = json.loads(lines[-2][6:])["error"]
        assert error["type"] == "server_error"
        assert "secret" not in lines[-2]
        assert lines[-1] == "data: [DONE]"
        with httpx.stream("POST", f"{address}/v1/messages", json=payload) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-2] == "event: error"
        assert json.loads(lines[-1][6:])["error"]["type"] == "api_error"
        found = httpx.post(f"{address}/v1/completions", json={"prompt": "x", "max_tokens": 9, "ignore_eos": True})
        assert found.status_code == 500


def test_health_is_bad_where_the_engine_makes_no_step(tmp_path):
    found, release = tiny_served(), threading.Event()
    call_before_parts(found.engine, lambda part: release.wait(20))
    with found.engine, running(host_of(found, folder=tmp_path, stuck_s=1)) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        payload = threading.Thread(
            target=httpx.post, args=(f"{address}/v1/completions",), kwargs={"json": {"prompt": "x", "max_tokens": 1}}
        )
        payload.start()
        wait_until(lambda: httpx.get(f"{address}/health").status_code == 503)
        assert "no step" in httpx.get(f"{address}/health").json()["error"]["message"]
        release.set()
        payload.join()
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_request_for_many_answers_holds_up_no_other(slow, slow_address):
    payload = {"prompt": [7] * 20, "max_tokens": 60, "ignore_eos": True, "n": 16, "stream": True, "logprobs": 0}
    with httpx.stream("POST", f"{slow_address}/v1/completions", json=payload, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        small = {"prompt": [9, 8], "max_tokens": 1}
        assert httpx.post(f"{slow_address}/v1/completions", json=small, timeout=30).status_code == 200
        # It came before most of the others' answers.
        states = slow.gate._waiting
        assert sum(map(len, states.values())) >= 4


def test_later_answers_of_a_request_have_no_limit_to_their_wait():
    async def wait():
        ticket = Gate(1, 8, 0.01).enter("key")
        await ticket.turn()
        later = asyncio.ensure_future(ticket.turn())
        await asyncio.sleep(0.05)
        assert not later.done()
        ticket.done()
        await later

    asyncio.run(wait())


def test_more_answers_than_a_request_may_have_are_refused(http):
    found = http.post("/v1/completions", json={"prompt": [[5], [6], [7], [8], [9]], "n": 16, "max_tokens": 1})
    assert found.status_code == 400
    assert "at most 64" in found.json()["error"]["message"]


def test_a_server_that_stops_ends_its_answers_with_an_error(tmp_path):
    found = tiny_served(max_batch=1)
    host = host_of(found, folder=tmp_path)
    release = decoding_paused(found)
    payload = {"prompt": [5, 6], "max_tokens": 20, "ignore_eos": True, "stream": True, "logprobs": 0}
    with found.engine, running_on_loop(host) as (address, loop):
        ends = []

        def read():
            with httpx.stream("POST", f"{address}/v1/completions", json=payload, timeout=60) as stream:
                ends.append([line for line in stream.iter_lines() if line][-2])

        async def stop():
            host.stop_answers()

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(host.active) == 6)
        # Answers belong to the event loop's thread.
        asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
        release.set()
        for thread in threads:
            thread.join()
    assert len(ends) == 6
    assert all(json.loads(end[6:])["error"]["code"] == "server_stopping" for end in ends)
