"""A streamed answer has the thoughts, texts and calls of the whole one, in each API, however it ends."""

from __future__ import annotations

import json
import re

import httpx2 as httpx
import pytest

from tests.server.running import host_of, running, tiny_served
from tests.support import tool_templates

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION = [{"role": "user", "content": "weather?"}]
BEGUN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
# Without a line's end before <: the vocabulary has a token of both, which the model may write as well.
CALL = BEGUN + 'me"}}</tool_call>'
MALFORMED = '<tool_call>\n{"name": "weather", "arguments": {"city": 1 2}}\n</tool_call> more'


def tokens_of(text):
    """The number of a text's tokens: <tool_call> and letters."""
    return len(re.findall(r"(?s)<tool_call>|.", text))


def grammar_of(text):
    """A grammar that makes the model write a text, <tool_call> as a control token."""
    parts = re.split("(<tool_call>)", text)
    return "start: " + " ".join(json.dumps(part) if number % 2 == 0 else part for number, part in enumerate(parts))


#: What a model writes -> the longest answer, its parts, and whether an invalid call was streamed besides.
ANSWERS = {
    "text": ("Sun.", 99, [("text", "Sun.")], False),
    "thought": ("<think>Hm.</think>", 99, [("thought", "Hm.")], False),
    "thought and text": ("<think>Hm.</think>Sun.", 99, [("thought", "Hm."), ("text", "Sun.")], False),
    "call": (f"I look.{CALL}", 99, [("text", "I look."), ("call", '{"city": "Rome"}')], False),
    "call and text": (CALL + "Done.", 99, [("call", '{"city": "Rome"}'), ("text", "Done.")], False),
    "cut call": (CALL, tokens_of(BEGUN), [("call", '{"city": "Ro')], False),
    "call behind which the limit lies": (CALL + "Done.", tokens_of(CALL), [("call", '{"city": "Rome"}')], False),
    "left call": (BEGUN, 99, [("text", BEGUN)], True),
    "malformed call": (MALFORMED, 99, [("text", MALFORMED)], True),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server whose model calls tools and thinks."""
    found = tiny_served()
    found.tokenizer.chat_template = tool_templates.HERMES
    host = host_of(found, folder=tmp_path_factory.mktemp("files"))
    with found.engine, running(host) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def both_ways(client, route, body):
    """The whole answer to a request, and the events of its stream."""
    whole = client.post(route, json=body)
    assert whole.status_code == 200, whole.text
    with client.stream("POST", route, json={**body, "stream": True}) as stream:
        return whole.json(), [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]


@pytest.mark.parametrize("name", ANSWERS)
def test_chat_completions(client, name):
    text, limit, expected, has_invalid = ANSWERS[name]
    body = {"messages": QUESTION, "tools": [TOOL], "grammar": grammar_of(text), "max_tokens": limit}
    whole, chunks = both_ways(client, "/v1/chat/completions", body)
    (choice,) = whole["choices"]
    message = choice["message"]
    calls = [each["function"]["arguments"] for each in message.get("tool_calls", ())]
    by_kind = {"text": [message["content"] or ""], "thought": [message.get("reasoning_content", "")], "call": calls}
    for kind, found in by_kind.items():
        assert "".join(found) == "".join(part for each, part in expected if each == kind)
    is_cut = limit < 99
    assert choice["finish_reason"] == ("length" if is_cut else "tool_calls" if calls else "stop")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(each.get("content", "") for each in deltas) == (message["content"] or "")
    assert "".join(each.get("reasoning_content", "") for each in deltas) == message.get("reasoning_content", "")
    streamed = [call["function"]["arguments"] for each in deltas for call in each.get("tool_calls", ())]
    assert has_invalid or "".join(streamed) == "".join(calls)
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("is_parallel", [True, False])
def test_an_answer_ends_with_its_first_call_where_that_is_asked_for(client, is_parallel):
    grammar, tools = grammar_of(f"I look.{CALL}\n{CALL}"), [TOOL]
    one = {"max_tokens": 200, "messages": QUESTION, "grammar": grammar}
    body = {**one, "tools": tools, "parallel_tool_calls": is_parallel, "n": 2}
    whole, chunks = both_ways(client, "/v1/chat/completions", body)
    count = 2 if is_parallel else 1
    for choice in whole["choices"]:
        assert [len(choice["message"]["tool_calls"]), choice["finish_reason"]] == [count, "tool_calls"]
    begun = [call for each in chunks for call in each["choices"][0]["delta"].get("tool_calls", ()) if "id" in call]
    assert len(begun) == 2 * count
    assert [each["choices"][0]["finish_reason"] for each in chunks if "timings" in each] == ["tool_calls"] * 2
    functions = [{"type": "function", **TOOL["function"]}]
    body = {"input": "x", "grammar": grammar, "tools": functions, "parallel_tool_calls": is_parallel}
    for response in (
        each["response"] for each in both_ways(client, "/v1/responses", body)[1] if "completed" in each["type"]
    ):
        assert [each["type"] for each in response["output"]] == ["message", *["function_call"] * count]
    choice = {"type": "auto", "disable_parallel_tool_use": not is_parallel}
    body = {**one, "tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": choice}
    whole, _ = both_ways(client, "/v1/messages", body)
    assert [len(whole["content"]), whole["stop_reason"]] == [1 + count, "tool_use"]


@pytest.mark.parametrize(("strict", "choice"), [(True, "auto"), (False, "auto"), (True, "required")])
def test_schemas_that_do_not_bind_are_named(client, strict, choice):
    tool = {"type": "function", "function": {**TOOL["function"], "strict": strict}}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": choice, "max_tokens": 1}
    header = client.post("/v1/chat/completions", json=body).headers.get("x-hetero-kv-ignored")
    assert header == ("tools.strict (tool_choice is auto)" if strict and choice == "auto" else None)


@pytest.mark.parametrize("name", ANSWERS)
def test_responses(client, name):
    text, limit, expected, has_invalid = ANSWERS[name]
    tool = {"type": "function", **TOOL["function"]}
    body = {"input": "weather?", "tools": [tool], "grammar": grammar_of(text), "max_output_tokens": limit}
    whole, events = both_ways(client, "/v1/responses", body)
    kinds = {"reasoning": "thought", "message": "text", "function_call": "call"}

    def parts(output):
        texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in output]
        return [(kinds[item["type"]], text) for item, text in zip(output, texts, strict=True)]

    assert parts(whole["output"]) == expected
    streamed = events[-1]["response"]
    assert parts(streamed["output"][has_invalid:]) == expected
    assert has_invalid == (streamed["output"][0]["status"] == "incomplete" and streamed["status"] == "completed")
    for field in ("status", "type", "content"):
        assert [each.get(field) for each in streamed["output"][has_invalid:]] == [
            each.get(field) for each in whole["output"]
        ]
    deltas = [(each["output_index"], each["delta"]) for each in events if each["type"].endswith("delta")]
    for number, (_, part) in enumerate(expected, has_invalid):
        assert "".join(delta for index, delta in deltas if index == number) == part


@pytest.mark.parametrize("name", ANSWERS)
def test_messages(client, name):
    text, limit, expected, has_invalid = ANSWERS[name]
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {"messages": QUESTION, "tools": [tool], "grammar": grammar_of(text), "max_tokens": limit}
    whole, events = both_ways(client, "/v1/messages", body)
    kinds = {"thinking": "thought", "text": "text", "tool_use": "call"}
    found = [(kinds[each["type"]], each.get("thinking", each.get("text"))) for each in whole["content"]]
    assert found == [(kind, None if kind == "call" else part) for kind, part in expected]
    # Of a call that was cut off, whole values alone.
    inputs = [each["input"] for each in whole["content"] if each["type"] == "tool_use"]
    assert inputs == [{"city": "Rome"} if part.endswith("}") else {} for kind, part in expected if kind == "call"]
    begun = [kinds[each["content_block"]["type"]] for each in events if each["type"] == "content_block_start"]
    assert begun[has_invalid:] == [kind for kind, _ in expected]
    for number, (_, part) in enumerate(expected, has_invalid):
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta" and each["index"] == number]
        texts = [each.get("thinking", each.get("text", each.get("partial_json", ""))) for each in deltas]
        assert "".join(texts) == part
