"""Tools: what a model writes becomes calls in each API's form, and a choice of tools is kept."""

from __future__ import annotations

import json

import httpx2 as httpx
import openai
import pytest

from tests.server.running import host_of, running, served_of, tiny_loaded, tiny_served
from tests.support import tool_templates

pytestmark = pytest.mark.usefixtures("one_thread")

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
PAYLOAD = [{"role": "user", "content": "weather?"}]


@pytest.fixture(scope="module")
def caller():
    """A model whose template has tools in Hermes' form."""
    found = tiny_served()
    found.tokenizer.chat_template = tool_templates.HERMES
    with found.engine:
        yield found


@pytest.fixture(scope="module")
def tokenizer(caller):
    """Its tokenizer."""
    return caller.tokenizer


@pytest.fixture(scope="module")
def address(caller, tmp_path_factory):
    """A server of it."""
    with running(host_of(caller, folder=tmp_path_factory.mktemp("files"))) as where:
        yield where


@pytest.fixture(scope="module")
def client(address):
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


REQUIRED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


def test_a_required_tool_is_called_with_arguments_of_its_schema(client):
    found = client.chat.completions.create(
        model="tiny", messages=PAYLOAD, max_tokens=300, temperature=1.0, seed=1, **REQUIRED
    )
    (call,) = found.choices[0].message.tool_calls
    assert found.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert not found.choices[0].message.content


def test_a_named_tool_is_called_once(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    found = client.chat.completions.create(
        model="tiny", messages=PAYLOAD, max_tokens=300, temperature=1.0, seed=3, tools=TOOLS, tool_choice=choice
    )
    assert [call.function.name for call in found.choices[0].message.tool_calls] == ["weather"]


def test_a_streamed_call_is_the_same(client):
    fields = {"model": "tiny", "messages": PAYLOAD, "max_tokens": 300, "temperature": 1.0, "seed": 1, **REQUIRED}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, arguments) == (whole.name, whole.arguments)


def test_responses_and_anthropics_messages_have_calls_too(client, address):
    import anthropic

    tool = {"type": "function", **WEATHER}
    fields = {"model": "tiny", "input": "weather?", "tools": [tool], "tool_choice": "required", "temperature": 1.0}
    found = client.responses.create(**fields, max_output_tokens=300, parallel_tool_calls=False)
    (call,) = [each for each in found.output if each.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(client.responses.create(**fields, max_output_tokens=300, parallel_tool_calls=False, stream=True))
    done = next(each for each in events if each.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments)["city"] in ("Rome", "Oslo")
    assert [each.type for each in events[-1].response.output] == ["function_call"]
    again = client.responses.create(
        model="tiny",
        previous_response_id=found.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=[tool],
        max_output_tokens=2,
    )
    assert again.usage.input_tokens > found.usage.input_tokens
    with anthropic.Anthropic(base_url=address, api_key="none") as claude:
        schema = {"name": "weather", "description": "x", "input_schema": WEATHER["parameters"]}
        choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        message = claude.messages.create(
            model="tiny",
            max_tokens=300,
            messages=PAYLOAD,
            tools=[schema],
            tool_choice=choice,
            extra_body={"temperature": 1.0},
        )
        (block,) = message.content
        assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        assert block.input["city"] in ("Rome", "Oslo")
        history = [
            *PAYLOAD,
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]},
        ]
        assert claude.messages.create(model="tiny", max_tokens=2, messages=history, tools=[schema]).usage.output_tokens


@pytest.mark.parametrize("begins", ["<tool_call>", "{"])
def test_an_answer_in_a_format_may_be_a_call_instead(client, tokenizer, begins):
    """Of tools beside response_format, which agents send together, none could be called."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    (token,) = tokenizer.encode(begins, add_special_tokens=False)
    fields = {"tools": TOOLS, "response_format": form, "parallel_tool_calls": False, "temperature": 1.0, "seed": 2}
    found = client.chat.completions.create(
        model="tiny", messages=PAYLOAD, max_tokens=300, logit_bias={str(token): 50}, **fields
    ).choices[0]
    if begins == "{":
        assert list(json.loads(found.message.content)) == ["a"]
        assert not found.message.tool_calls
    else:
        assert [call.function.name for call in found.message.tool_calls] == ["weather"]
        assert json.loads(found.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_malformed_arguments_in_history_are_no_error(client):
    history = [
        *PAYLOAD,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{bad"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "error: <tool_call> <|im_end|>"},
    ]
    assert client.chat.completions.create(model="tiny", messages=history, tools=TOOLS, max_tokens=2).choices


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "sometimes"),
        ({"tools": TOOLS, "tool_choice": 5}, "5"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "name"),
        ({**REQUIRED, "json_schema": {}}, "constrain one answer"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(address, fields, words):
    found = httpx.post(f"{address}/v1/chat/completions", json={"messages": PAYLOAD, "max_tokens": 2, **fields})
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


def test_without_a_notion_of_tools_they_are_refused(served, tmp_path):
    with running(host_of(served, folder=tmp_path)) as plain:
        found = httpx.post(f"{plain}/v1/chat/completions", json={"messages": PAYLOAD, "max_tokens": 2, "tools": TOOLS})
    assert found.status_code == 400
    assert "tools" in found.json()["error"]["message"]


def test_several_recipes_of_one_model_are_served_and_named(tmp_path):
    from hetero_kv.loading import with_rules
    from tests.support.small_recipes import small_recipe

    loaded = tiny_loaded()
    dense = served_of(loaded, "dense")
    quest = served_of(with_rules(loaded, small_recipe("quest", max_seq_len=800)), "quest", max_batch=2)
    payload = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 6}
    with (
        dense.engine,
        quest.engine,
        running(host_of(dense, quest, folder=tmp_path)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == ["tiny:dense", "tiny:quest"]
        found = {
            name: client.post("/v1/chat/completions", json={**payload, "model": name}).json()
            for name in ("tiny:quest", ":quest", "tiny", "tiny:dense", "")
        }
        assert {name: each["model"] for name, each in found.items()} == {
            "tiny:quest": "tiny:quest", ":quest": "tiny:quest", "tiny": "tiny:dense", "tiny:dense": "tiny:dense",
            "": "tiny:dense",
        }  # fmt: skip


def test_a_call_that_is_cut_is_incomplete_and_is_not_gone_on_with(client):
    tool = {"type": "function", **WEATHER}
    fields = {"model": "tiny", "input": "weather?", "tools": [tool], "tool_choice": "required", "temperature": 1.0}
    events = list(client.responses.create(**fields, max_output_tokens=45, stream=True))
    whole = events[-1].response
    assert whole.status == "incomplete"
    assert [each.status for each in whole.output] == ["incomplete"]
    assert not any(each.type == "response.function_call_arguments.done" for each in events)
    again = client.responses.create(model="tiny", input="so?", previous_response_id=whole.id, max_output_tokens=1)
    assert again.usage.input_tokens > 0
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=PAYLOAD,
            max_tokens=45,
            stream=True,
            tools=TOOLS,
            tool_choice="required",
            temperature=1.0,
        )
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert not any(each.choices[0].delta.content for each in chunks)
