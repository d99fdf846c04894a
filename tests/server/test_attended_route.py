"""`/v1/attended`: what a token of an answer attended to, by the id of the response."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest

from hetero_kv.server import attended_routes
from tests.server.running import host_of, running

pytestmark = pytest.mark.usefixtures("one_thread")

PAYLOAD = {"messages": [{"role": "user", "content": "hello there, what is it?"}], "max_tokens": 8}


def test_the_shares_of_passages_sum_to_one_and_have_their_texts(http, served):
    answer = http.post("/v1/chat/completions", json=PAYLOAD).json()
    prompt = answer["usage"]["prompt_tokens"]
    for token in (0, 5):
        found = http.post("/v1/attended", json={"response_id": answer["id"], "token": token, "bins": 10}).json()
        shares = [each["share"] for each in found["bins"]]
        assert sum(shares) + found["estimated"] + found["sinks"] == pytest.approx(1, abs=1e-4)
        assert found["prompt_tokens"] == prompt
        assert found["bins"][0]["first"] == 0
        assert found["bins"][-1]["last"] == prompt + token - 1
        assert all(sum(layer) == pytest.approx(1, abs=1e-4) for layer in found["layers"])
    text = "".join(each["text"] for each in found["bins"])
    assert "hello there, what is it?" in text


def test_a_long_passage_says_that_it_is_cut(http, monkeypatch):
    monkeypatch.setattr(attended_routes, "LONGEST_PASSAGE", 8)
    answer = http.post("/v1/chat/completions", json=PAYLOAD).json()["id"]
    found = http.post("/v1/attended", json={"response_id": answer, "token": 1, "bins": 2}).json()
    assert [(len(each["text"]), each["is_cut"]) for each in found["bins"]] == [(8, True)] * 2


def test_an_answer_that_is_unknown_or_of_another_key_is_not_found(http, served, tmp_path):
    missing = http.post("/v1/attended", json={"response_id": "chatcmpl-x", "token": 0})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "answer_not_found")
    with running(host_of(served, folder=tmp_path, keys=("ann:secret-of-ann", "bob:secret-of-bob"))) as address:
        ann, bob = ({"x-api-key": f"secret-of-{name}"} for name in ("ann", "bob"))
        answer = httpx.post(f"{address}/v1/chat/completions", json=PAYLOAD, headers=ann).json()["id"]
        payload = {"response_id": answer, "token": 1}
        assert httpx.post(f"{address}/v1/attended", json=payload, headers=bob).status_code == 404
        assert httpx.post(f"{address}/v1/attended", json=payload, headers=ann).status_code == 200


def test_a_token_that_the_answer_has_not_is_refused(http):
    answer = http.post("/v1/chat/completions", json=PAYLOAD).json()["id"]
    found = http.post("/v1/attended", json={"response_id": answer, "token": 8})
    assert found.status_code == 400
    assert "has 8 tokens" in found.json()["error"]["message"]
    assert http.post("/v1/attended", json={"response_id": answer, "token": 0, "bins": 0}).status_code == 400


def test_an_answer_that_its_reader_stopped_is_remembered_as_far_as_it_came(http):
    body = {**PAYLOAD, "max_tokens": 400, "ignore_eos": True, "stream": True, "return_tokens": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        chunks = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        shown = next(chunk for chunk in chunks if chunk.get("token_index", 0) >= 3)
    payload = {"response_id": shown["id"], "token": shown["token_index"], "bins": 10}
    found = http.post("/v1/attended", json=payload)
    assert found.status_code == 200, found.text
    assert found.json()["bins"][-1]["last"] == found.json()["prompt_tokens"] + shown["token_index"] - 1
