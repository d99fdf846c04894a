"""What one API key has stored is found by no other one: beginnings of prompts, and files."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from tests.server.running import host_of, running

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = ("ann:secret-of-ann", "bob:secret-of-bob")


def as_key(client, name):
    client.headers["authorization"] = f"Bearer secret-of-{name}"
    return client


def cached(client, document, name):
    """How many tokens of a question about a document are known to a key."""
    fields = {"messages": [{"role": "user", "content": document}], "max_tokens": 1}
    usage = as_key(client, name).post("/v1/chat/completions", json=fields).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("keys", "settings", "shares"), [
    (KEYS, {}, False),
    (KEYS, {"share_prefixes": True}, True),
    # Two secrets of one name are one tenant.
    (("ann:secret-of-ann", "ann:secret-of-bob"), {}, True),
])  # fmt: skip
def test_another_key_finds_a_beginning_only_where_keys_share_them(served, tmp_path, keys, settings, shares):
    document = f"The minutes of {tmp_path.name}, which nobody else has read. " * 5
    host = host_of(served, folder=tmp_path, keys=keys, **settings)
    with running(host) as address, httpx.Client(base_url=address, timeout=60) as client:
        cached(client, document, "ann")
        others = cached(client, document + "What was decided?", "bob")
        assert (others > 200) == shares
        assert cached(client, document + "Who was there?", "ann") > 200


def test_a_file_is_unknown_to_another_key(served, tmp_path):
    host = host_of(served, folder=tmp_path, keys=KEYS)
    with running(host) as address, httpx.Client(base_url=address, timeout=60) as client:
        upload = {"file": ("notes.txt", b"The key is 12345.\n")}
        file_id = as_key(client, "ann").post("/v1/files", files=upload).json()["id"]
        part = {"type": "file", "file": {"file_id": file_id}}
        asks = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        as_key(client, "bob")
        assert client.get("/v1/files").json()["data"] == []
        assert client.get(f"/v1/files/{file_id}").status_code == 404
        assert client.get(f"/v1/files/{file_id}/content").status_code == 404
        assert client.delete(f"/v1/files/{file_id}").status_code == 404
        assert client.post("/v1/chat/completions", json=asks).status_code == 404
        as_key(client, "ann")
        assert client.get(f"/v1/files/{file_id}/content").text == "The key is 12345.\n"
        assert client.post("/v1/chat/completions", json=asks).status_code == 200
