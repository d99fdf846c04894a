"""What users reported of other servers and their clients: each a situation that must end well here, or be told."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest

from hetero_kv.server.anthropic import MessagesRequest
from hetero_kv.server.chat import ChatRequest
from hetero_kv.server.completions import CompletionRequest
from hetero_kv.server.responses import ResponseRequest
from tests.server.running import CAPACITY, host_of, running, tiny_served
from tests.support import tool_templates

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTION = [{"role": "user", "content": "weather?"}]
#: A question behind which there is room for a few dozen tokens.
LONG_QUESTION = [{"role": "user", "content": "x" * (CAPACITY - 60)}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A client of a server whose model calls tools and thinks."""
    found = tiny_served()
    found.tokenizer.chat_template = tool_templates.HERMES
    host = host_of(found, folder=tmp_path_factory.mktemp("files"))
    with found.engine, running(host) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def events(client, route, **body):
    """The JSON values of a stream's events."""
    with client.stream("POST", route, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200, stream.read()
        return [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]


def chat(client, **fields):
    """A chat completion's response."""
    return client.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 4, **fields})


def test_the_first_chunk_of_a_call_has_its_name_and_no_arguments(caller):
    """llama.cpp 22722: arguments in the chunk that names the call are lost to clients that add up the others."""
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 1}
    chunks = events(caller, "/v1/chat/completions", messages=QUESTION, max_tokens=300, **fields)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert all(set(each) == {"index", "function"} for each in deltas[1:])
    assert json.loads("".join(each["function"]["arguments"] for each in deltas))["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("messages", [QUESTION, [*QUESTION, {"role": "assistant", "content": "<think>\nHm"}]])
def test_a_stream_begins_with_a_role_and_no_chunk_has_null_as_content(caller, messages):
    """sglang 18335, unmute 80 (of llama-server): clients join the contents of chunks, null among them."""
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(caller, "/v1/chat/completions", messages=messages, max_tokens=12, ignore_eos=True)
    ]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in each for each in deltas[1:])
    assert all(isinstance(text, str) for each in deltas for text in each.values())


def test_no_chunk_has_the_beginning_of_a_stop_text_that_ends_the_answer(http):
    """vLLM 3574, 2577: a stop text of several tokens was streamed but for its last token."""
    body = {"prompt": [9, 8, 7], "max_tokens": 30, "logit_bias": {"9": 100, "8": 99}, "frequency_penalty": 2.0}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = whole[5:9]
    chunks = events(http, "/v1/completions", **body, stop=stop)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole[: whole.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_character_of_several_tokens_is_streamed_whole(served, http):
    """vLLM 931, mlx-vlm 1076, text-generation-webui (SillyTavern 354): each byte became a replacement character."""
    word = served.tokenizer("你好🎭", add_special_tokens=False)["input_ids"]
    assert len(word) == 10
    grammar = 'start: "你好🎭"'
    texts = [
        chunk["choices"][0]["text"]
        for chunk in events(http, "/v1/completions", prompt=[9, 8], max_tokens=20, grammar=grammar)
    ]
    assert [text for text in texts if text] == ["你", "好", "🎭"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_its_usage_where_that_is_asked_for_and_nowhere_else(http, route):
    """LM Studio 676 and 713, omlx 61: a stream had no usage; clients refuse chunks without choices elsewhere."""
    body = {"messages": QUESTION} if "chat" in route else {"prompt": "hello"}
    body |= {"max_tokens": 3, "ignore_eos": True}
    told = events(http, route, **body, stream_options={"include_usage": True})
    assert [chunk["choices"] for chunk in told if "usage" in chunk] == [[]]
    assert told[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["choices"] and "usage" not in chunk for chunk in events(http, route, **body))


def test_several_items_of_a_response_are_one_conversation(http):
    """LM Studio 1064: an input of several items was a 400."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
        {"role": "user", "content": "And now?"},
    ]
    found = http.post(
        "/v1/responses", json={"input": items, "instructions": "", "store": False, "max_output_tokens": 2}
    )
    assert found.status_code == 200, found.text
    roles = [("system", "Be brief."), ("user", "hello."), ("assistant", "Hi"), ("user", "And now?")]
    messages = [{"role": role, "content": text} for role, text in roles]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    expected = len(http.post("/tokenize", json={"content": prompt}).json()["tokens"])
    assert found.json()["usage"]["input_tokens"] == expected


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_longest_answer_of_minus_one_is_as_long_as_fits(http, field):
    """llama-cpp-python 1645: every answer ended at once with the reason "length"."""
    found = chat(http, **{"messages": LONG_QUESTION, "max_tokens": None, field: -1, "ignore_eos": True}).json()
    assert found["usage"]["total_tokens"] == CAPACITY + 1
    assert found["usage"]["completion_tokens"] > 8
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("route", "fields", "body"),
    [
        ("chat/completions", ChatRequest, {"messages": QUESTION, "max_completion_tokens": 3}),
        ("completions", CompletionRequest, {"prompt": "hello", "max_tokens": 3}),
        ("responses", ResponseRequest, {"input": "hello", "max_output_tokens": 3}),
        ("messages", MessagesRequest, {"messages": QUESTION, "max_tokens": 3}),
    ],
)
def test_null_means_that_a_field_is_left_out(http, route, fields, body):
    """BetterChatGPT 248 (of llama-cpp-python): max_tokens: null was an error of validation."""
    found = http.post(f"/v1/{route}", json={**dict.fromkeys(fields.model_fields), **body})
    assert found.status_code == 200, found.text
    left_out = http.post(f"/v1/{route}", json=body).json()
    (part,) = {"choices", "output", "content"} & left_out.keys()
    assert {**found.json()[part][0], "id": ""} == {**left_out[part][0], "id": ""}


def test_what_no_stream_can_begin_with_is_a_400(http):
    """Clients retry on an error of a stream that had begun."""
    for stream in (False, True):
        found = chat(http, logit_bias={"999999": 1}, stream=stream)
        assert found.status_code == 400
        assert found.json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("completions", {"prompt": "x", "stop": [1]}, "stop"),
        ("completions", {"prompt": ["x", [1]]}, "prompt"),
    ],
)
def test_an_error_names_the_field_that_was_sent(http, route, fields, param):
    error = http.post(f"/v1/{route}", json={"messages": QUESTION, **fields}).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("route", "fields", "words"),
    [
        (
            "chat/completions",
            {
                "messages": [
                    *QUESTION,
                    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                    *QUESTION,
                ]
            },
            "messages[1] has function_call; give it as tool_calls",
        ),
        ("chat/completions", {"messages": [{"role": "assistant", "audio": {"id": "x"}}, *QUESTION]}, "has audio"),
        ("responses", {"input": "x", "conversation": "conv_1"}, "previous_response_id"),
        ("responses", {"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ("responses", {"input": "x", "top_logprobs": 2}, "log-probabilities"),
        ("responses", {"input": "x", "include": ["message.output_text.logprobs"]}, "log-probabilities"),
        ("responses", {"input": [{}]}, "input[0] has no content"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0] has no content"),
        (
            "chat/completions",
            {"messages": [*QUESTION, {"role": "tool", "content": None}]},
            "messages[1] has no content",
        ),
        ("responses", {"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort is 5"),
        ("responses", {"input": "x", "reasoning": {"effort": "huge"}}, "the reasoning effort is 'huge'"),
        ("chat/completions", {"messages": QUESTION, "reasoning_effort": "huge"}, "the reasoning effort is 'huge'"),
        ("chat/completions", {"messages": QUESTION, "stream_options": {"include_usage": "all"}}, "include_usage"),
        ("messages", {"messages": QUESTION, "thinking": {"type": "on"}}, "thinking has the type 'on'"),
        ("messages", {"messages": QUESTION, "output_config": {"effort": 5}}, "output_config.effort is 5"),
    ],
)
def test_a_conversation_that_would_lack_something_is_refused(http, route, fields, words):
    found = http.post(f"/v1/{route}", json={"max_tokens": 1, "max_output_tokens": 1, **fields})
    assert (found.status_code, words in found.json()["error"]["message"]) == (400, True), found.text


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"messages": [{**QUESTION[0], "name": "Bob"}]}, "messages.name"),
        ({"stream_options": {"include_usage": True}}, "stream_options (stream is false)"),
        ({"enable_thinking": False}, "enable_thinking"),
        (
            {"return_progress": True, "return_tokens": True},
            "return_progress (stream is false),return_tokens (stream is f",
        ),
        ({"messages": [{**QUESTION[0], "name": None}], "return_progress": False}, None),
    ],
)
def test_what_has_no_effect_is_named(http, fields, ignored):
    header = chat(http, **fields).headers.get("x-hetero-kv-ignored")
    assert header is None if ignored is None else header.startswith(ignored)


@pytest.mark.parametrize(
    ("route", "fields", "ignored"),
    [
        ("responses", {"stream_options": {"a": 1}}, "stream_options"),
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.encrypted_content"),
        ("messages", {"output_config": {"effort": "low", "a": 1}}, "output_config.effort,output_config.a"),
        ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("chat/completions", {"stream": True, "stream_options": {"include_usage": True, "a": 1}}, "stream_options.a"),
    ],
)
def test_parts_of_fields_without_effect_are_named_once(http, route, fields, ignored):
    body = {"input": "x"} if route == "responses" else {"messages": QUESTION}
    longest = "max_output_tokens" if route == "responses" else "max_tokens"
    found = http.post(f"/v1/{route}", json={**body, longest: 1, **fields})
    assert (found.status_code, found.headers["x-hetero-kv-ignored"]) == (200, ignored)


def test_a_refusal_in_history_is_what_the_model_said(http):
    said = [
        chat(http, messages=[*QUESTION, {"role": "assistant", **answer}, *QUESTION]).json()["choices"][0]["message"]
        for answer in ({"content": None, "refusal": "I can't."}, {"content": "I can't."}, {"content": ""})
    ]
    assert said[0] == said[1] != said[2]


def test_an_answer_does_not_depend_on_the_prompts_beside_its_own(http):
    """Neither its length nor its seed."""
    prompts = [[5] * (CAPACITY - 40), [5] * (CAPACITY - 20)]
    body = {"max_tokens": -1, "ignore_eos": True, "temperature": 1.0, "seed": 3, "logprobs": 0}
    found = [
        http.post("/v1/completions", json={**body, "prompt": prompt}).json() for prompt in ([*prompts], prompts[1])
    ]
    tokens = [[len(each["logprobs"]["tokens"]) for each in one["choices"]] for one in found]
    assert tokens == [[41, 21], [21]]
    assert found[0]["choices"][1]["text"] == found[1]["choices"][0]["text"]


def test_ids_of_calls_that_are_null_are_no_error(caller):
    """aichat 1296 (of llama-server): a call whose id is null, and its result, were a 500 for ever."""
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": None, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": None, "content": "sun"},
    ]
    found = chat(caller, messages=history, tools=[TOOL])
    assert found.status_code == 200, found.text


def test_an_answer_longer_than_what_is_left_is_given_as_far_as_it_fits(http):
    """lmdeploy 1589: prompt and max_tokens beyond the capacity together gave an empty answer."""
    found = chat(http, messages=LONG_QUESTION, max_tokens=CAPACITY, ignore_eos=True).json()
    assert 8 < found["usage"]["completion_tokens"] == CAPACITY + 1 - found["usage"]["prompt_tokens"]
    assert found["choices"][0]["finish_reason"] == "length"


def test_tools_that_a_client_runs_are_refused_without_a_schema(caller):
    """Anthropic's bash has no schema in the request, and a model here would never hear of it."""
    tools = [{"type": "bash_20250124", "name": "bash"}]
    found = caller.post("/v1/messages", json={"model": "", "max_tokens": 2, "messages": QUESTION, "tools": tools})
    assert found.status_code == 400
    assert "bash_20250124" in found.json()["error"]["message"]


def test_tools_that_run_at_anthropic_are_named_and_left_out(caller):
    """unsloth 5141 (of Codex), and Claude Code's search of the web: an unknown type of tool ended the session."""
    own = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    body = {"model": "", "max_tokens": 2, "messages": QUESTION}
    with_others = {**body, "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, own]}
    found = caller.post("/v1/messages", json=with_others)
    assert found.status_code == 200, found.text
    assert found.headers["x-hetero-kv-ignored"] == "tools[0] (web_search_20250305)"
    alone = caller.post("/v1/messages", json={**body, "tools": [own]})
    total = [
        sum(each.json()["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_")) for each in (found, alone)
    ]
    assert total[0] == total[1]


def test_a_template_that_ends_with_an_opened_thought_and_a_stop_text_in_it_leaves_no_mark(tmp_path):
    """vLLM 14170: with a stop text, the end of a thought was shown as content."""
    found = tiny_served()
    tokenizer = found.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.removesuffix("{% endif %}") + "<think>\n{% endif %}"
    body = {"messages": QUESTION, "max_tokens": 20, "ignore_eos": True}
    with (
        found.engine,
        running(host_of(found, folder=tmp_path)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        thought = chat(client, **body).json()["choices"][0]["message"]["reasoning_content"]
        message = chat(client, **body, stop=thought[3:6]).json()["choices"][0]["message"]
    # Blank lines at the end of a thought are its template's.
    assert message["reasoning_content"] == thought[: thought.index(thought[3:6])].rstrip()
    assert message["content"] == ""
