"""`/v1/completions`: the tokens are the engine's own, streamed or not."""

from __future__ import annotations

import json

import openai
import pytest

from hetero_kv import SamplingParams
from hetero_kv.models.text_encoding import PromptPiece, TextEncoder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def client(address):
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


def own(served, prompt, **params):
    """The engine's answer to a text."""
    tokens = TextEncoder(served.tokenizer).encode([PromptPiece(prompt)], add_special_tokens=True)
    return served.engine.generate(tokens, SamplingParams(**params)).result()


def test_a_text_is_continued_by_the_engines_tokens(client, served):
    found = client.completions.create(model="tiny", prompt="hello", max_tokens=12)
    expected = own(served, "hello", max_new_tokens=12)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 12
    assert found.usage.prompt_tokens == expected.prompt_tokens
    assert found.model == "tiny:dense"


def test_a_stream_gives_the_same_text_and_ends_with_usage(client, served):
    chunks = list(
        client.completions.create(
            model="tiny:dense", prompt="hello", max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(each.choices[0].text for each in chunks if each.choices)
    assert text == own(served, "hello", max_new_tokens=12).text
    assert chunks[-1].usage.completion_tokens == 12
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"


def test_token_ids_and_several_prompts_are_continued_each(client, served):
    found = client.completions.create(model="tiny", prompt=[[5, 6, 7], [9, 8]], max_tokens=3, n=2, temperature=0)
    params = SamplingParams(max_new_tokens=3)
    expected = [served.engine.generate(tokens, params).result().text for tokens in ([5, 6, 7], [9, 8])]
    assert [each.text for each in found.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert found.usage.prompt_tokens == 5


def test_a_seed_gives_the_same_answer_and_answers_differ(client):
    payload = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "temperature": 1.5, "n": 2}
    first, again, other = (client.completions.create(**payload, seed=seed) for seed in (7, 7, 8))
    assert [each.text for each in first.choices] == [each.text for each in again.choices]
    assert first.choices[0].text != first.choices[1].text
    assert first.choices[0].text != other.choices[0].text


def test_log_probabilities_are_the_models(client, served):
    found = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=2)
    expected = own(served, "hello", max_new_tokens=4, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([piece.logprob for piece in expected.pieces])
    assert all(len(each) == 2 for each in logprobs.top_logprobs)
    assert len(logprobs.text_offset) == 4


def test_a_drawn_token_is_among_its_alternatives(http):
    body = {"prompt": "hello", "max_tokens": 6, "logprobs": 1, "temperature": 5.0, "seed": 1}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    for token, value, best in zip(
        *(found[f"{name}s"] for name in ("token", "token_logprob", "top_logprob")), strict=True
    ):
        assert best[token] == value
    assert max(map(len, found["top_logprobs"])) == 2


def test_reuse_and_priority_are_those_of_the_request(served, http, monkeypatch):
    given, generate = [], served.engine.generate
    monkeypatch.setattr(
        served.engine, "generate", lambda *each, **fields: (given.append(fields), generate(*each, **fields))[1]
    )
    for fields in ({}, {"cache_prompt": False, "priority": 2}):
        http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1, **fields})
    assert [(each["reuses"], each["priority"]) for each in given] == [(True, 0), (False, 2)]


def test_a_json_schema_is_followed(http):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    }
    payload = {"prompt": "hello", "max_tokens": 200, "temperature": 1.0, "seed": 3}
    for form in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"json_schema": schema},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        found = http.post("/v1/completions", json={**payload, **form}).json()
        answer = json.loads(found["choices"][0]["text"])
        assert list(answer) == ["a"]
        assert 0 <= answer["a"] <= 9
        assert found["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_and_a_regular_expression_are_followed(http):
    payload = {"prompt": "hello", "max_tokens": 50, "temperature": 1.0}
    found = http.post("/v1/completions", json={**payload, "grammar": 'start: "yes" | "no"'}).json()
    assert found["choices"][0]["text"] in ("yes", "no")
    found = http.post(
        "/v1/completions", json={**payload, "response_format": {"type": "regex", "regex": "[ab]{3}"}}
    ).json()
    assert len(found["choices"][0]["text"]) == 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_p": 0}, "top_p", "more than 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"n": 99}, "n", "at most 16"),
        ({"n": 0}, "n", "greater than"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": 5}, None, "prompt"),
        ({"prompt": [99999]}, None, "token 99999"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "fim_prefix"),
        ({"best_of": 4}, "best_of", "must be n"),
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"logprobs": 99}, "logprobs", "20"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"json_schema": {"type": "nonsense"}}, None, "cannot be compiled"),
        ({"json_schema": "{"}, "json_schema", "no JSON"),
        ({"grammar": "start: nothing"}, None, "cannot be compiled"),
        ({"grammar": 'start: "a"', "json_schema": {}}, None, "one of them"),
        ({"model": "gpt-4o"}, "model", "tiny:dense"),
    ],
)
def test_a_mistake_is_a_400_that_names_the_field(http, fields, param, words):
    found = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **fields})
    error = found.json()["error"]
    assert found.status_code == (404 if "model" in fields else 400)
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


def test_a_prompt_that_is_too_long_is_a_400_with_both_numbers(http):
    found = http.post("/v1/completions", json={"prompt": [5] * 900})
    error = found.json()["error"]
    assert found.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (900, 800)
    assert "900" in error["message"]
    assert "800" in error["message"]


def test_fields_without_effect_are_named_in_a_header(http):
    found = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1, "mirostat": 2, "zzz": None})
    assert found.status_code == 200
    assert found.headers["x-hetero-kv-ignored"] == "mirostat,zzz"


def test_an_answer_without_a_limit_is_as_long_as_openais(client):
    found = client.completions.create(model="tiny", prompt="hello")
    assert found.usage.completion_tokens <= 16


def test_what_draws_has_no_effect_where_the_likeliest_token_is_taken_and_is_named(http):
    found = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1, "top_p": 0.5, "min_p": 0.1})
    assert found.headers["x-hetero-kv-ignored"] == "top_p (temperature is 0),min_p (temperature is 0)"
    drawn = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1, "top_p": 0.5, "temperature": 1})
    assert "x-hetero-kv-ignored" not in drawn.headers


def test_no_request_goes_before_others_by_a_priority_that_it_gives_itself(http):
    assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1, "priority": -1}).status_code == 400
    assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1, "priority": 3}).status_code == 200
