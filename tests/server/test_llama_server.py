"""llama-server's own routes, and what is kept apart between API keys."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from tests.server.running import host_of, running

pytestmark = pytest.mark.usefixtures("one_thread")


def test_texts_become_tokens_and_tokens_texts(http, served):
    tokenizer = served.tokenizer
    tokens = http.post("/tokenize", json={"content": "hello <|im_end|>"}).json()["tokens"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == "hello <|im_end|>"
    plain = http.post("/tokenize", json={"content": "hello <|im_end|>", "parse_special": False}).json()["tokens"]
    assert tokenizer.eos_token_id not in plain
    pieces = http.post("/tokenize", json={"content": "ä", "with_pieces": True}).json()["tokens"]
    assert [each["piece"] for each in pieces] == ["bytes:\\xc3", "bytes:\\xa4"]
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_a_template_is_applied(http):
    found = http.post("/apply-template", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert found["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_properties_and_slots_say_what_there_is(http):
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 800
    assert props["total_slots"] == 8
    assert http.get("/slots").json() == []


def test_models_are_listed_and_named(http):
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["meta"]["n_ctx"], model["meta"]["recipe"]) == ("tiny:dense", 800, "dense")
    assert http.get("/v1/models/tiny:dense").json() == model
    assert http.get("/v1/models/other").status_code == 404


def test_files_and_responses_belong_to_the_key_that_made_them(served, tmp_path):
    host = host_of(served, folder=tmp_path, keys=("ann:secret-of-ann", "bob:secret-of-bob"))
    with running(host) as address:
        ann, bob = (
            httpx.Client(base_url=address, headers={"x-api-key": f"secret-of-{name}"}, timeout=30)
            for name in ("ann", "bob")
        )
        with ann, bob:
            file = ann.post("/v1/files", files={"file": ("x.txt", b"of ann")}).json()["id"]
            payload = {"input": "hello", "max_output_tokens": 1}
            answer = ann.post("/v1/responses", json=payload).json()["id"]
            assert ann.get(f"/v1/files/{file}/content").text == "of ann"
            assert bob.get(f"/v1/files/{file}").status_code == 404
            assert bob.get(f"/v1/files/{file}/content").status_code == 404
            assert bob.delete(f"/v1/files/{file}").status_code == 404
            assert bob.get("/v1/files").json()["data"] == []
            assert bob.get(f"/v1/responses/{answer}").status_code == 404
            assert bob.post("/v1/responses", json={**payload, "previous_response_id": answer}).status_code == 404
            assert ann.get(f"/v1/responses/{answer}").status_code == 200


def test_files_are_bounded_and_must_have_text(served, tmp_path):
    host = host_of(served, folder=tmp_path, file_gb=1e-6)
    with running(host) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert client.post("/v1/files", files={"file": ("a.txt", b"x" * 600)}).status_code == 200
        full = client.post("/v1/files", files={"file": ("b.txt", b"x" * 600)})
        assert (full.status_code, full.json()["error"]["code"]) == (507, "files_full")
        for name, content in (("c.txt", b""), ("d.txt", b"\0\1\2"), ("e.pdf", b"%PDF-1.4 nothing")):
            assert client.post("/v1/files", files={"file": (name, content)}).status_code == 400
        assert client.post("/v1/files", json={}).status_code == 400
        assert client.post("/v1/files", data={"purpose": "x"}, files={}).status_code == 400
        assert (
            client.post(
                "/v1/files", content=b"garbage", headers={"content-type": "multipart/form-data; boundary=x"}
            ).status_code
            == 400
        )


def test_old_responses_are_forgotten(served, tmp_path):
    with (
        running(host_of(served, folder=tmp_path, kept_responses=1)) as address,
        httpx.Client(base_url=address, timeout=30) as client,
    ):
        payload = {"input": "hello", "max_output_tokens": 1}
        first, second = (client.post("/v1/responses", json=payload).json()["id"] for _ in range(2))
        assert client.get(f"/v1/responses/{first}").status_code == 404
        assert client.get(f"/v1/responses/{second}").status_code == 200
        third = client.post("/v1/responses", json={**payload, "store": False}).json()["id"]
        assert client.get(f"/v1/responses/{third}").status_code == 404


def test_operations_have_ids_of_their_own(http):
    paths = http.get("/openapi.json").json()["paths"]
    operations = [each["operationId"] for methods in paths.values() for each in methods.values()]
    assert len(operations) > 20
    assert sorted(set(operations)) == sorted(operations)
    assert [http.head(path).status_code for path in ("/health", "/v1/health")] == [200, 200]
