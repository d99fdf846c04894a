"""What a request passes before any route: keys, hosts, origins, limits of size and time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx2 as httpx
import pytest

from hetero_kv.errors import ConfigError
from hetero_kv.server.app import application
from hetero_kv.server.keys import Keys
from tests.server.running import host_of, running

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def guarded(served, tmp_path_factory):
    """A server with two keys and narrow limits."""
    host = host_of(
        served, folder=tmp_path_factory.mktemp("files"), keys=("ann:secret-of-ann", "bob:secret-of-bob"),
        body_mb=0.01, read_s=0.4,
    )  # fmt: skip
    with running(host) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def test_a_key_is_needed_in_either_header(guarded):
    assert guarded.get("/v1/models").status_code == 401
    assert guarded.get("/v1/models", headers=bearer("secret-of-eve")).status_code == 401
    assert guarded.get("/v1/models", headers=bearer("secret-of-ann")).status_code == 200
    assert guarded.get("/v1/models", headers={"x-api-key": "secret-of-bob"}).status_code == 200
    assert guarded.get("/metrics").status_code == 401
    refused = guarded.get("/v1/models")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert guarded.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"


def test_health_needs_no_key(guarded):
    assert guarded.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("secret", ["short", "with space in it", "umlaut-äöü-key", "name:short"])
def test_a_key_that_is_none_is_refused_at_the_start(secret):
    with pytest.raises(ConfigError, match="--api_key"):
        Keys([secret])


def test_a_key_is_the_same_tenant_whatever_other_keys_there_are():
    alone, two = Keys(["ann:secret-of-ann"]), Keys(["ann:secret-of-ann", "bob:secret-of-bob"])
    assert alone.tenant("ann") == two.tenant("ann")
    assert two.tenant("bob") == Keys(["bob:secret-of-bob"]).tenant("bob")
    assert len({two.tenant("ann"), two.tenant("bob"), Keys().tenant("anybody")}) == 3
    assert Keys().tenant("anybody") == ""


def test_a_body_that_is_too_large_is_refused_before_it_is_read(guarded):
    found = guarded.post("/v1/completions", content=b"x" * 20_000, headers=bearer("secret-of-ann"))
    assert found.status_code == 413
    assert "10,000 bytes" in found.json()["error"]["message"]

    def pieces():
        yield from (b"x" * 4000 for _ in range(5))

    assert guarded.post("/v1/completions", content=pieces(), headers=bearer("secret-of-ann")).status_code == 413


def test_a_body_that_does_not_come_is_refused(guarded):
    with socket.create_connection((guarded.base_url.host, guarded.base_url.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret-of-ann\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        connection.settimeout(20)
        assert b" 408 " in connection.recv(4096).partition(b"\r\n")[0]


@pytest.mark.parametrize("body", ["[" * 9000, '{"prompt": "\\ud800"}', '{"prompt": 1e999}', "9" * 9000, "null", ""])
def test_hostile_json_is_a_400(guarded, body):
    headers = {**bearer("secret-of-ann"), "content-type": "application/json"}
    found = guarded.post("/v1/completions", content=body.encode(), headers=headers)
    assert found.status_code == 400
    assert found.json()["error"]["message"]


def test_every_response_has_an_id_and_forbids_framing(guarded):
    found = guarded.get("/health", headers={"x-request-id": "mine-1"})
    assert found.headers["x-request-id"] == "mine-1"
    assert found.headers["x-frame-options"] == "DENY"
    assert guarded.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_without_keys_other_hosts_and_origins_are_refused(http):
    assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    found = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert found.status_code == 403
    assert found.json()["error"]["code"] == "unknown_origin"
    own = f"http://{http.base_url.host}:{http.base_url.port}"
    assert http.get("/v1/models", headers={"origin": own}).status_code == 200


def test_an_allowed_origin_may_use_the_server(served, tmp_path):
    with running(host_of(served, folder=tmp_path), origins=("https://chat.example",)) as address:
        found = httpx.options(
            f"{address}/v1/chat/completions",
            headers={"origin": "https://chat.example", "access-control-request-method": "POST"},
        )
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-hetero-kv-ignored" in found.headers["access-control-expose-headers"]


def test_unknown_routes_and_methods_are_errors_of_the_api(http):
    found = http.get("/v1/nothing")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
    assert http.get("/v1/completions").status_code == 405


def test_requests_of_a_key_are_limited_per_minute(served, tmp_path):
    host = host_of(served, folder=tmp_path, keys=("ann:secret-of-ann", "bob:secret-of-bob"), requests_per_minute=2)
    payload = {"prompt": "hello", "max_tokens": 1}
    with running(host) as address:

        def status(secret):
            return httpx.post(f"{address}/v1/completions", json=payload, headers=bearer(secret), timeout=30)

        assert [status("secret-of-ann").status_code for _ in range(3)] == [200, 200, 429]
        refused = status("secret-of-ann")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert status("secret-of-bob").status_code == 200


def test_tokens_of_a_key_are_limited_per_minute(served, tmp_path):
    host = host_of(served, folder=tmp_path, tokens_per_minute=20)
    with running(host) as address:
        payload = {"prompt": [5] * 30, "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=payload, timeout=30).status_code == 200
        assert httpx.post(f"{address}/v1/completions", json=payload, timeout=30).status_code == 429


def test_metrics_count_requests_and_tokens(served, tmp_path):
    with running(host_of(served, folder=tmp_path)) as address:
        httpx.post(f"{address}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4}, timeout=30)
        lines = httpx.get(f"{address}/metrics").text.splitlines()
    assert 'hetero_kv_answer_tokens_total{model="tiny:dense"} 4.0' in lines
    assert 'hetero_kv_prompt_tokens_total{model="tiny:dense"} 3.0' in lines
    assert 'hetero_kv_requests_total{route="/v1/completions",status="200"} 1.0' in lines
    assert any(line.startswith("hetero_kv_free_tokens") for line in lines)


def test_a_client_that_takes_nothing_loses_its_place(served, tmp_path):
    host = host_of(served, folder=tmp_path, write_s=0.2)
    body = json.dumps({"prompt": [5] * 10, "max_tokens": 700, "stream": True}).encode()
    sent = []

    async def receive():
        if not sent:
            sent.append("request")
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            # As where the client's window is full.
            await asyncio.Event().wait()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "",
    }  # fmt: skip
    asyncio.run(application(host)(scope, receive, send))
    began = time.monotonic()
    while served.engine.status().requests and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert served.engine.status().requests == ()
    assert b'reason="cancelled"} 1.0' in host.metrics.text()
    assert b'route="/v1/completions",status="499"} 1.0' in host.metrics.text()
    assert served.gate.waiting == 0


def test_a_fault_of_the_server_is_an_answer_with_an_id_and_a_line_in_the_log(served, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("hetero_kv.server.llama_server._model", fail)
    with running(host_of(served, folder=tmp_path)) as address, caplog.at_level("INFO", "hetero_kv.server"):
        found = httpx.get(f"{address}/v1/models")
        # The line follows the answer.
        deadline = time.monotonic() + 10
        while not any("status=500" in each.getMessage() for each in caplog.records) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert found.status_code == 500
    assert "secret" not in found.text
    assert found.headers["x-request-id"].startswith("req_")
    assert found.headers["x-frame-options"] == "DENY"
    assert any("status=500" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("host", ["[abc", "a b", "[::1", "\u00e4.example"])
def test_a_host_that_is_none_is_refused(http, host):
    assert http.get("/v1/models", headers={b"host": host.encode("latin-1")}).status_code in (400, 403)


def test_what_needs_no_key_reads_no_body(guarded):
    assert guarded.request("GET", "/health", content=b"x" * 20_000).status_code == 200
    assert guarded.head("/health").status_code == 200


def test_parallel_requests_of_a_key_are_counted_when_they_come(served, tmp_path):
    host = host_of(served, folder=tmp_path, requests_per_minute=2)
    with running(host) as address:
        statuses = []
        payload = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True}
        threads = [
            threading.Thread(
                target=lambda: statuses.append(
                    httpx.post(f"{address}/v1/completions", json=payload, timeout=30).status_code
                )
            )
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(statuses) == [200, 200, 429, 429, 429]


def test_tokens_of_a_client_that_leaves_are_counted(served, tmp_path):
    host = host_of(served, folder=tmp_path, tokens_per_minute=60)
    with running(host) as address:
        payload = {"prompt": [5] * 50, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 0}
        with httpx.stream("POST", f"{address}/v1/completions", json=payload, timeout=30) as stream:
            for number, _ in enumerate(stream.iter_lines()):
                if number > 60:
                    break
        assert httpx.post(f"{address}/v1/completions", json=payload, timeout=30).status_code == 429


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/props", "/slots", "/metrics", "/v1/files"])
def test_a_head_is_that_of_the_whole_response(http, path):
    head, whole = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json_is_told_what_to_say(http, kind):
    """curl -d without a header sends a form; the error was about a dictionary."""
    headers = {} if kind is None else {"content-type": kind}
    found = http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert found.status_code == 415
    assert f"Content-Type is {kind or 'missing'}; send JSON" in found.json()["error"]["message"]
    said = {"content-type": "application/json; charset=utf-8"}
    assert http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=said).status_code == 200


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\xff"}'])
def test_a_body_that_python_cannot_read_is_told_why(http, content):
    found = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert (found.status_code, "less deep and with shorter numbers" in found.text) == (400, True)


def test_small_matters_of_http(http):
    refused = http.put("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    # The names that OpenAI's and Anthropic's clients read.
    headers = http.get("/health").headers
    assert headers["request-id"] == headers["x-request-id"]
