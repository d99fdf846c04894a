"""The command itself: a server that is killed or stopped, and starts again."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

DOCUMENT = "The minutes of the meeting of the committee. " * 12


@contextmanager
def started(folder, *flags):
    """A server of the small real model, and its address."""
    command = [
        sys.executable, "-m", "hetero_kv", "serve", "--model", "smollm2-135m-instruct", "--port", "0",
        "--max_seq_len", "1024", "--context_folder", str(folder / "contexts"), *flags,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines = []
    while not (found := re.search(r"API: (http://\S+)/v1", "".join(lines))):
        line = process.stderr.readline()
        assert line, "".join(lines)
        lines.append(line)
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def cached(address, question):
    """Cached tokens of a question about the document."""
    body = {"messages": [{"role": "user", "content": f"{DOCUMENT}\n\n{question}"}], "max_tokens": 2}
    found = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=300).json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_for_a_context(folder):
    """Wait until a sequence is on the disk."""
    began = time.monotonic()
    while not list((folder / "contexts").rglob("*.safetensors")) and time.monotonic() - began < 60:
        time.sleep(0.1)
    time.sleep(1)


def test_a_killed_server_loses_no_stored_context(tmp_path):
    with started(tmp_path) as (process, address):
        assert cached(address, "What was decided?") < 50
        wait_for_a_context(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with started(tmp_path) as (_, address):
        assert cached(address, "Who was there?") > 80


def test_a_server_that_is_killed_under_load_again_and_again_loses_no_stored_context(tmp_path):
    """KILLS=20 kills it more often."""
    drawn = random.Random(1)

    def load(address, number):
        body = {"prompt": f"{number} {DOCUMENT}", "max_tokens": 200, "ignore_eos": True, "stream": True}
        # Its end is the server's.
        with suppress(httpx.HTTPError), httpx.stream("POST", f"{address}/v1/completions", json=body) as stream:
            stream.read()

    with started(tmp_path) as (_, address):
        cached(address, "What was decided?")
        wait_for_a_context(tmp_path)
    for kill in range(int(os.environ.get("KILLS", "2"))):
        with started(tmp_path) as (_, address):
            assert cached(address, f"Who was there, {kill}?") > 80
            clients = [threading.Thread(target=load, args=(address, f"{kill}.{number}")) for number in range(4)]
            for client in clients:
                client.start()
            # In a prefill, an answer, or while an idle server writes.
            time.sleep(drawn.uniform(0, 6))
        for client in clients:
            client.join()
    with started(tmp_path) as (_, address):
        assert cached(address, "When was it?") > 80


def test_a_stopped_server_ends_its_answers_and_keeps_their_contexts(tmp_path):
    with started(tmp_path, "--shutdown_s", "60") as (process, address):
        body = {"prompt": DOCUMENT, "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=300) as stream:
            lines = []
            for line in stream.iter_lines():
                if line and not lines:
                    process.send_signal(signal.SIGTERM)
                lines += [line] if line else []
        assert lines[-1] == "data: [DONE]"
        assert process.wait(120) == 0
    with started(tmp_path) as (_, address):
        payload = {"prompt": DOCUMENT, "max_tokens": 1}
        found = httpx.post(f"{address}/v1/completions", json=payload, timeout=300).json()
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 80


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with started(tmp_path) as (_, address):
        command = [sys.executable, "-m", "hetero_kv", "serve", "--port", address.rpartition(":")[2]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "cannot listen" in ended.stderr


@pytest.mark.parametrize(
    "head", [b"x-a: " + b"y" * 200_000, b"x-a: y\r\n" * 20_000, b"\0: y\r\n\r\n"], ids=["long", "many", "zero"]
)
def test_a_head_without_end_closes_its_connection_alone(tmp_path, head):
    with started(tmp_path) as (_, address):
        place = urlsplit(address)
        with socket.create_connection((place.hostname, place.port), timeout=30) as connection, suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + head)
            assert b" 400 " in connection.recv(4096).partition(b"\r\n")[0]
        assert httpx.get(f"{address}/health").status_code == 200
