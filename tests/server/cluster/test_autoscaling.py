"""A cluster by `serve run` and a configuration, that gets a second replica under load and gives it up again."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import pytest

from tests.server.cluster.questions import ask, cached, document, streamed, text_of
from tests.server.cluster.running_cluster import served_by_ray, waited_for
from tests.server.cluster.tiny_folder import CAPACITY, tiny_folder

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def configuration(folder):
    """One replica or two, which are soon more and soon fewer."""
    arguments = {
        "model": str(tiny_folder(folder / "tiny")), "config": ["dense"], "max_seq_len": CAPACITY, "dtype": "float32",
        "insecure": True, "speculation": "off", "context_folder": str(folder / "contexts"),
        "file_folder": str(folder / "files"),
        "report_s": 0.2, "max_batch": 4, "replicas": "auto", "most_replicas": 2, "replica_cpus": 0,
    }  # fmt: skip
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2,
        "policy": {"policy_function": "hetero_kv.server.cluster.autoscaling:replicas_for_load"},
    }  # fmt: skip
    application = {
        "name": "hetero-kv", "route_prefix": "/", "import_path": "hetero_kv.serving.cluster:app", "args": arguments,
        "deployments": [{"name": "engines", "autoscaling_config": scaling}],
    }  # fmt: skip
    return {"proxy_location": "HeadOnly", "applications": [application]}


def test_a_second_replica_comes_under_load_and_drains_when_it_is_over(tmp_path):
    period = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}
    with served_by_ray(configuration(tmp_path), tmp_path, **period) as cluster:
        documents = [document(number) for number in range(500, 508)]
        expected = [text_of(ask(cluster, each, max_tokens=400)) for each in documents]
        assert len(cluster.replicas) == 1

        async def load():
            """Answers at a time until there are two replicas, and then two long ones until there is one."""
            async with httpx.AsyncClient(base_url=cluster.address, timeout=120) as client:
                over, answers = asyncio.Event(), []

                async def again(number):
                    while not over.is_set():
                        answers.append((number, await streamed(client, documents[number], max_tokens=400)))

                async def become(count):
                    for _ in range(600):
                        if len(cluster.replicas) == count:
                            return
                        await asyncio.sleep(0.1)
                    raise AssertionError(f"{len(cluster.replicas)} replicas, not {count}")

                tasks = [asyncio.create_task(again(number)) for number in range(8)]
                await become(2)
                await asyncio.sleep(5)
                both = [sum(each.cpu_times()[:2]) for each in cluster.replicas]
                await asyncio.sleep(1)
                both = [sum(each.cpu_times()[:2]) - was for each, was in zip(cluster.replicas, both, strict=True)]
                over.set()
                await asyncio.gather(*tasks)
                over.clear()
                # Two rows of four: as much as one replica answers.
                tasks = [asyncio.create_task(again(number)) for number in range(2)]
                await become(1)
                over.set()
                await asyncio.gather(*tasks)
                return both, answers

        both, answers = asyncio.run(load())
        assert min(both) > 0.1
        assert len(answers) > 10
        assert [(number, text) for number, text in answers if text != (expected[number], None)] == []
        for each in documents:
            assert cached(ask(cluster, each)) > 200
        waited_for(lambda: list((tmp_path / "contexts").rglob("*.safetensors")))
