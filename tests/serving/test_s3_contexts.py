"""Engines share contexts at an S3 address, of moto's server on this machine, and go on while that is dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request

import fsspec
import pytest

from hetero_kv import SamplingParams
from hetero_kv.contexts import cards, medium
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of

pytest.importorskip("s3fs")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif("MOTO_SERVER" not in os.environ, reason="MOTO_SERVER names no program moto_server"),
]

FIRST, OTHER = PROMPTS[3], PROMPTS[2]
FOLLOWING = [*FIRST, *PROMPTS[1]]
ONE = SamplingParams(max_new_tokens=1)
BUCKET = "contexts"


class S3Server:
    """moto's server, whose objects are gone when it ends."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [os.environ["MOTO_SERVER"], "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                urllib.request.urlopen(self.address, timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        fsspec.filesystem("s3").mkdir(BUCKET)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(monkeypatch):
    """A server with an empty bucket, which s3fs finds by the environment."""
    found = S3Server()
    values = {
        "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": found.address, "AWS_MAX_ATTEMPTS": "1",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for name in ("_FRESH_S", "_FRESH_TIMES"):
        monkeypatch.setattr(cards, name, 0)
    monkeypatch.setattr(medium, "_PAUSES_S", (0.01, 0.01))
    fsspec.filesystem("s3").clear_instance_cache()
    found.start()
    yield found
    found.kill()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An engine with a disk cache of its own."""

    def engine(name, **settings):
        monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / name))
        return engine_of("adaptive", context_folder=f"s3://{BUCKET}/engines", **settings)

    return engine


def objects():
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    return files.find(BUCKET)


def test_another_machine_goes_on_from_what_one_has_uploaded(server, machine):
    with machine("one") as engine:
        engine.generate(FIRST, ONE).result()
    assert any("/blocks/" in path for path in objects())
    with machine("two") as engine:
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert (found.cached_tokens, found.reuse.source) == (len(FIRST), "disk")
        assert found.tokens == alone(engine, FOLLOWING)
        assert engine.status().context_failures == 0


def test_requests_go_on_while_the_server_is_dead_and_upload_when_it_is_back(server, machine, caplog):
    with machine("one") as engine:
        engine.generate(FIRST, ONE).result()
    server.kill()
    with machine("two", context_wait_s=2.0) as engine:
        found = engine.generate(OTHER, GREEDY).result()
        assert (found.cached_tokens, found.reuse.reason) == (0, "store_away")
        assert found.tokens == alone(engine, OTHER)
        assert "requests go on without it" in caplog.text
        server.start()
        time.sleep(0.05)
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert found.tokens == alone(engine, FOLLOWING)
    assert any("/blocks/" in path for path in objects())
