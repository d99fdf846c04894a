"""Anthropic's messages: the engine's own tokens, through the official client."""

from __future__ import annotations

import base64

import pytest

from tests.server.test_chat import HELLO, own

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def claude(address):
    """Anthropic's own client, whose import takes seconds."""
    import anthropic

    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as found:
        yield found


def test_anthropics_messages_are_answered_by_the_engines_tokens(claude, served):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    found = claude.messages.create(model="tiny", max_tokens=8, system="be", messages=messages)
    expected = own(served, [{"role": "system", "content": "be"}, *HELLO], 8)
    assert found.content[0].text == expected.text
    assert found.stop_reason == "max_tokens"
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == expected.prompt_tokens
    with claude.messages.stream(model="tiny", max_tokens=8, system="be", messages=messages) as stream:
        assert "".join(stream.text_stream) == expected.text
    counted = claude.messages.count_tokens(model="tiny", system="be", messages=messages)
    assert counted.input_tokens == expected.prompt_tokens


def test_a_billing_header_does_not_change_the_prompt(claude):
    def payload(head):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {head}"}, {"type": "text", "text": "be"}]
        return claude.messages.count_tokens(model="tiny", system=system, messages=HELLO).input_tokens

    plain = claude.messages.count_tokens(model="tiny", system="be", messages=HELLO).input_tokens
    assert payload("cc_version=1; cch=abc") == payload("cc_version=2; cch=defghi") == plain


def test_documents_in_anthropics_form_are_read(claude, served):
    data = base64.b64encode(b"<html><body><p>The key is 7.</p></body></html>").decode()
    block = {"type": "document", "title": "x.html", "source": {"type": "base64", "media_type": "x", "data": data}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": "Which?"}]}]
    counted = claude.messages.count_tokens(model="tiny", messages=messages).input_tokens
    plain = [{"role": "user", "content": "x.html\n\nThe key is 7.\n\nWhich?"}]
    assert counted == len(served.engine.encode(plain))


def test_documents_in_results_of_tools_are_read():
    from hetero_kv.server.anthropic_messages import template_messages

    document = {"type": "document", "source": {"type": "text", "data": "The key is 7."}}
    content = [{"type": "text", "text": "Read:"}, document]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    (message,), _ = template_messages([{"role": "user", "content": [result]}], str)
    assert message == {"role": "tool", "tool_call_id": "a", "content": "Read:\nThe key is 7."}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads texts only"),
        ({"system": 5}, "system"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "tokens > 800 maximum"),
    ],
)
def test_mistakes_have_anthropics_form(http, fields, words):
    found = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 2, "messages": HELLO, **fields})
    body = found.json()
    assert found.status_code == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
