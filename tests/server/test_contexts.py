"""Conversations are found by their beginnings: in memory, and in a folder after a restart."""

from __future__ import annotations

import errno
import time

import httpx2 as httpx
import pytest

from hetero_kv.durable_file import write_atomically
from hetero_kv.server import files, stored_responses
from tests.server.running import host_of, running, tiny_served
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = "The minutes of the meeting. " * 15


def answered(address, question):
    """A question about the document: the usage and the answer."""
    parts = [{"type": "text", "text": DOCUMENT}, {"type": "text", "text": question}]
    fields = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    found = httpx.post(f"{address}/v1/chat/completions", json=fields, timeout=60).json()
    return found["usage"], found["choices"][0]["message"]["content"]


@pytest.mark.parametrize("recipe", with_few(["adaptive", "dense"]))
def test_a_second_question_computes_its_own_tokens_alone_also_after_a_restart(tmp_path, recipe):
    contexts = tmp_path / "contexts"
    for number, question in enumerate(("What was decided?", "Who was there?", "When was it?")):
        served = tiny_served(recipe, context_folder=contexts)
        with served.engine, running(host_of(served, folder=tmp_path)) as address:
            usage, answer = answered(address, question)
            again, same = answered(address, question)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 350 if number else cached == 0
        assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
        assert answer == same
    alone = tiny_served(recipe)
    with alone.engine, running(host_of(alone, folder=tmp_path)) as address:
        assert answered(address, "When was it?")[1] == answer


def test_a_conversation_is_written_while_nobody_asks(tmp_path):
    contexts = tmp_path / "contexts"
    served = tiny_served(context_folder=contexts)
    with served.engine, running(host_of(served, folder=tmp_path)) as address:
        answered(address, "What was decided?")
        began = time.monotonic()
        # As a killed process would leave it.
        while not any(contexts.rglob("*.safetensors")) and time.monotonic() - began < 20:
            time.sleep(0.05)
        time.sleep(0.3)
        other = tiny_served(context_folder=contexts)
        with other.engine, running(host_of(other, folder=tmp_path)) as second:
            usage, _ = answered(second, "Who was there?")
    assert usage["prompt_tokens_details"]["cached_tokens"] > 350


def test_a_full_disk_costs_no_answer_and_leaves_no_part_of_an_upload(tmp_path, monkeypatch):
    full, written = OSError(errno.ENOSPC, "No space left on device", str(tmp_path)), []

    def write(path, content, **options):
        if not path.name.endswith(".txt"):
            raise full
        written.append(path)
        write_atomically(path, content, **options)

    for module in (files, stored_responses):
        monkeypatch.setattr(module, "write_atomically", write)
    served = tiny_served()
    with served.engine, running(host_of(served, folder=tmp_path)) as address:
        upload = httpx.post(f"{address}/v1/files", files={"file": ("a.txt", b"hello")}, timeout=60)
        body = {"input": "hello", "max_output_tokens": 2}
        found = httpx.post(f"{address}/v1/responses", json=body, timeout=60)
        streamed = httpx.post(f"{address}/v1/responses", json={**body, "stream": True}, timeout=60).text
    assert (upload.status_code, upload.json()["error"]["code"]) == (507, "files_full")
    assert "No space left on device" in upload.text
    assert str(tmp_path) not in upload.text
    assert len(written) == 1
    assert not written[0].exists()
    assert found.status_code == 200, found.text
    assert found.json()["store"] is False
    assert '"type":"response.incomplete"' in streamed
    assert '"store":false' in streamed
