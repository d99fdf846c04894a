"""Two replicas on Ray Serve behind one address: documents stay where they are, and answers outlive their replicas."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter

import httpx2 as httpx
import pytest

from tests.server.cluster.questions import ask, body, cached, document, streamed, text_of
from tests.server.cluster.running_cluster import cluster_of, waited_for
from tests.server.cluster.tiny_folder import CAPACITY, tiny_folder

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SILENT_S = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster") / "contexts"


@pytest.fixture(scope="module")
def cluster(folder):
    with cluster_of(
        tiny_folder(folder.parent / "tiny"), "--replicas", "2", "--max_seq_len", str(CAPACITY), "--speculation", "off",
        "--context_folder", str(folder), "--file_folder", str(folder.parent / "files"), "--silent_s", str(SILENT_S),
        "--report_s", "0.2", "--max_batch", "4", "--queue_length", "64", "--prefill_replicas", "1",
        "--prefill_tokens", "1000",
    ) as found:  # fmt: skip
        yield found


def test_every_document_of_many_conversations_is_computed_at_most_twice(cluster):
    conversations = [number for number in range(20) for _ in range(10)]
    random.Random(0).shuffle(conversations)

    async def all_of_them():
        several = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=cluster.address, timeout=120) as client:

            async def one(turn, number):
                async with several:
                    found = await client.post("/v1/completions", json=body(f"{document(number)} What of {turn}?"))
                assert found.status_code == 200, found.text
                return number, cached(found.json())

            return await asyncio.gather(*(one(*each) for each in enumerate(conversations)))

    computed = Counter(number for number, known in asyncio.run(all_of_them()) if known < 200)
    assert set(computed) <= set(range(20))
    assert max(computed.values()) <= 2
    busy = [sum(each.cpu_times()[:2]) for each in cluster.replicas]
    assert len(busy) == 2


def test_answers_of_all_kinds_come_through_the_ingress(cluster):
    address = cluster.address
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    payload = {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 20, "response_format": schema}
    found = httpx.post(f"{address}/v1/chat/completions", json=payload, timeout=120).json()
    assert json.loads(found["choices"][0]["message"]["content"]) in ("yes", "no")
    seen = {"response_id": found["id"], "token": 1, "bins": 4}
    attended = httpx.post(f"{address}/v1/attended", json=seen, timeout=120).json()
    assert len(attended["bins"]) == 4
    seeded = {"temperature": 1.5, "seed": 5, "max_tokens": 12, "n": 2}
    first, second = ask(cluster, "Once", **seeded), ask(cluster, "Once", **seeded)
    assert [each["text"] for each in first["choices"]] == [each["text"] for each in second["choices"]]
    messages = {"model": "tiny", "max_tokens": 3, "messages": payload["messages"]}
    assert httpx.post(f"{address}/v1/messages", json=messages, timeout=120).json()["usage"]["output_tokens"] <= 3
    long = httpx.post(f"{address}/v1/completions", json=body("x" * 4 * CAPACITY), timeout=120)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = httpx.post(f"{address}/v1/completions", json=body("x", logit_bias={"100000": 1}), timeout=120)
    assert refused.status_code == 400
    assert "logit_bias names token 100000" in refused.json()["error"]["message"]
    assert httpx.get(f"{address}/health", timeout=60).json() == {"status": "ok"}
    assert 'hetero_kv_kept_prefixes{model="tiny:dense"}' in httpx.get(f"{address}/metrics", timeout=60).text


def test_bodies_of_many_megabytes_pass_both_ways(cluster):
    # A message of gRPC has 4 MB unless it is told otherwise.
    content = b"abcdefgh" * (1 << 20)
    files = {"file": ("long.txt", content, "text/plain")}
    uploaded = httpx.post(f"{cluster.address}/v1/files", files=files, timeout=120)
    assert uploaded.status_code == 200, uploaded.text
    found = httpx.get(f"{cluster.address}/v1/files/{uploaded.json()['id']}/content", timeout=120)
    assert found.content == content


def test_a_long_prompt_is_computed_by_a_prefill_replica_and_resumed_from_the_folder(cluster):
    prompt = document(50) * 4
    first = ask(cluster, prompt)
    tokens = first["usage"]["prompt_tokens"]
    assert tokens > 1000
    assert cached(first) > tokens - 100
    assert text_of(ask(cluster, prompt)) == text_of(first)
    # A short one is computed where it is answered.
    assert cached(ask(cluster, document(51))) < 64


def test_a_client_that_leaves_cancels_its_answer_at_the_replica(cluster):
    def slots():
        return httpx.get(f"{cluster.address}/slots", timeout=60).json()

    fields = body("Once upon a time", stream=True, max_tokens=CAPACITY - 50)
    with httpx.stream("POST", f"{cluster.address}/v1/completions", json=fields, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        waited_for(slots)
    waited_for(lambda: not slots(), 10)


def test_a_killed_replica_makes_no_answer_wrong_and_the_other_one_has_its_contexts(cluster, folder):
    documents = [document(100 + number) for number in range(6)]
    expected = [text_of(ask(cluster, each, max_tokens=200)) for each in documents]
    waited_for(lambda: not httpx.get(f"{cluster.address}/slots", timeout=60).json())
    stored = len(list(folder.rglob("*.safetensors")))
    waited_for(lambda: len(list(folder.rglob("*.safetensors"))) >= stored, 5)
    killed = cluster.replicas[0]

    async def load():
        async with httpx.AsyncClient(base_url=cluster.address, timeout=120) as client:
            tasks = [
                asyncio.create_task(streamed(client, documents[number % 6], max_tokens=200)) for number in range(12)
            ]
            await asyncio.sleep(1.0)
            under_way = sum(not each.done() for each in tasks)
            killed.send_signal(signal.SIGKILL)
            return under_way, await asyncio.gather(*tasks)

    under_way, answers = asyncio.run(load())
    assert under_way
    for number, (text, error) in enumerate(answers):
        assert text == expected[number % 6] or (error is not None and expected[number % 6].startswith(text))
    assert sum(error is None for _, error in answers) >= 6
    for number, each in enumerate(documents):
        found = ask(cluster, f"{each} And then?")
        assert cached(found) > 200, number
    waited_for(lambda: len(cluster.replicas) == 2 and killed.pid not in {each.pid for each in cluster.replicas}, 120)


def test_answers_of_a_replica_that_hangs_go_on_elsewhere(cluster):
    # In the answer about document 203 two tokens are equally likely but for rounding.
    documents = [document(number) for number in (200, 201, 202, 204, 205)]
    expected = [text_of(ask(cluster, each, max_tokens=200)) for each in documents]
    hanging = cluster.replicas[0]

    async def load():
        async with httpx.AsyncClient(base_url=cluster.address, timeout=120) as client:
            tasks = [asyncio.create_task(streamed(client, each, max_tokens=200)) for each in documents]
            await asyncio.sleep(0.5)
            hanging.send_signal(signal.SIGSTOP)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(load())
    assert answers == [(each, None) for each in expected]
    # Ray would wait for its graceful end, some minutes.
    hanging.kill()
    waited_for(lambda: len(cluster.replicas) == 2 and hanging.pid not in {each.pid for each in cluster.replicas}, 120)


def test_the_shared_folder_may_go_and_come_back(cluster, folder):
    before = text_of(ask(cluster, document(300)))
    away = folder.rename(folder.with_name("away"))
    try:
        assert text_of(ask(cluster, document(300))) == before
        assert text_of(ask(cluster, document(301)))
    finally:
        if folder.exists():
            # What was stored meanwhile goes.
            folder.rename(folder.with_name("meanwhile"))
        away.rename(folder)
    count = len(list(folder.rglob("*.safetensors")))
    assert text_of(ask(cluster, document(302)))
    waited_for(lambda: len(list(folder.rglob("*.safetensors"))) > count, 60)
