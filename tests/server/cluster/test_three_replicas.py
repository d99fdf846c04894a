"""Three replicas on Ray Serve behind one address, of which one dies under load."""

from __future__ import annotations

import asyncio
import signal

import httpx2 as httpx
import pytest

from tests.server.cluster.questions import ask, document, streamed, text_of
from tests.server.cluster.running_cluster import cluster_of, waited_for
from tests.server.cluster.tiny_folder import CAPACITY, tiny_folder

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def test_of_three_replicas_two_go_on_when_one_is_killed(tmp_path):
    documents = [document(number) for number in range(400, 406)]
    with cluster_of(
        tiny_folder(tmp_path / "tiny"), "--replicas", "3", "--max_seq_len", str(CAPACITY), "--speculation", "off",
        "--context_folder", str(tmp_path / "contexts"), "--file_folder", str(tmp_path / "files"), "--report_s", "0.2",
        "--max_batch", "4",
    ) as cluster:  # fmt: skip
        before = cluster.replicas
        assert len(before) == 3
        expected = [text_of(ask(cluster, each, max_tokens=200)) for each in documents]

        async def load():
            async with httpx.AsyncClient(base_url=cluster.address, timeout=120) as client:
                tasks = [
                    asyncio.create_task(streamed(client, documents[number % 6], max_tokens=200)) for number in range(12)
                ]
                await asyncio.sleep(0.5)
                busy = [sum(each.cpu_times()[:2]) for each in before]
                await asyncio.sleep(0.5)
                busy = [sum(each.cpu_times()[:2]) - was for each, was in zip(before, busy, strict=True)]
                killed = before[busy.index(max(busy))]
                under_way = sum(not each.done() for each in tasks)
                killed.send_signal(signal.SIGKILL)
                return killed, under_way, await asyncio.gather(*tasks)

        killed, under_way, answers = asyncio.run(load())
        assert under_way
        assert answers == [(expected[number % 6], None) for number in range(12)]
        others = {each.pid for each in before} - {killed.pid}
        assert others <= {each.pid for each in cluster.replicas}
        waited_for(lambda: len(cluster.replicas) == 3, 120)
