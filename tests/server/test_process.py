"""The command itself: a server that is killed or stopped, and starts again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

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


def test_a_killed_server_loses_no_stored_context(tmp_path):
    with started(tmp_path) as (process, address):
        assert cached(address, "What was decided?") < 50
        began = time.monotonic()
        while not list((tmp_path / "contexts").rglob("*.safetensors")) and time.monotonic() - began < 60:
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with started(tmp_path) as (_, address):
        assert cached(address, "Who was there?") > 80


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
