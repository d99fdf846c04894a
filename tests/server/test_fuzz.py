"""Any JSON for any field of any route is answered or refused, never a fault of the server's."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_kv.server.anthropic import MessagesRequest
from hetero_kv.server.attended_routes import AttendedRequest
from hetero_kv.server.chat import ChatRequest
from hetero_kv.server.completions import CompletionRequest
from hetero_kv.server.llama_server import DetokenizeRequest, TokenizeRequest
from hetero_kv.server.responses import ResponseRequest

pytestmark = pytest.mark.usefixtures("one_thread")

ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/v1/attended": AttendedRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
MESSAGES = [{"role": "user", "content": "hello"}]
WORDS = st.sampled_from(
    [
        "text",
        "function",
        "auto",
        "json_object",
        "json_schema",
        "<|im_end|>",
        "../..",
        "-1",
        "\ud800",
        "",
        "type",
        "role",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats(-5, 5) | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_any_kind_is_a_fault_of_the_server(http, route):
    fields = sorted(set(ROUTES[route].model_fields) - {"stream"})

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(given_fields=st.dictionaries(st.sampled_from(fields), VALUES, max_size=3))
    def ask(given_fields):
        small = {
            "max_tokens": 2,
            "max_output_tokens": 2,
            "messages": MESSAGES,
            "prompt": "x",
            "input": "x",
            "content": "x",
        }
        body = json.dumps({**{name: value for name, value in small.items() if name in fields}, **given_fields})
        found = http.post(route, content=body.encode(), headers={"content-type": "application/json"})
        assert found.status_code in (200, 400, 404), (body, found.text)
        if found.status_code != 200:
            assert found.json()["error"]["message"]

    ask()
