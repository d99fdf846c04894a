# ruff: noqa: RUF001 (DeepSeek's control tokens)
"""Answers as thoughts, content and tool calls: what a family's template writes is read back, however it is split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetero_kv.serving.answers import Answer, AnswerForm, CallArguments, CallBegun, CallEnded
from hetero_kv.serving.stream import Piece
from hetero_kv.serving.text_stream import TextStream
from tests.serving.answer_forms import FAMILIES, MARKERS, tokenizer_of, tool, written
from tests.support.slow_variants import with_slow

TYPED = ("qwen_coder", "glm")
KEYS = st.text("abcé\"' _", min_size=1, max_size=4).filter(lambda key: key == key.strip())
STRINGS = st.text(max_size=6) | st.text('\n </>ap{}[]"\\é,:', max_size=6) | st.sampled_from(["5", "true", "<tool_cal"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(-9, 9) | STRINGS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "look_up"]), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=2
)


def kind_of(value):
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def tools_for(calls):
    properties = {name: {} for name, _ in calls}
    for name, arguments in calls:
        for key, value in arguments.items():
            kind = properties[name].setdefault(key, {"type": kind_of(value)})
            assume(kind["type"] == kind_of(value))
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": each}}}
        for name, each in properties.items()
    ]


def pieces_of(tokenizer, parser, text, cuts=()):
    """The pieces of an answer: those of its tokens, or the text cut at some places."""
    if cuts:
        places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        return [Piece(0, text[start:end]) for start, end in pairwise(places)], text
    stream = TextStream(tokenizer.backend_tokenizer, (), parser.markers)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [Piece(token, stream.add(token), marker=parser.markers.get(token, "")) for token in tokens]
    stream.end()
    return pieces, stream.text


def events_of(family, text, tools, *, has_markers=True, cuts=(), prompt=()):
    tokenizer = tokenizer_of(family, has_markers)
    parser = AnswerForm(tokenizer).parser(prompt, tools)
    pieces, whole = pieces_of(tokenizer, parser, text, cuts)
    events = [event for piece in pieces for event in parser.add(piece)]
    return [*events, *parser.end(whole)]


def answer_of(family, text, tools, **settings):
    answer = Answer()
    answer.add(events_of(family, text, tools, **settings))
    return answer


TOOL = [tool(a={"type": "string"})]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_shows_its_form(family):
    assert AnswerForm(tokenizer_of(family, True)).name == family
    assert AnswerForm(tokenizer_of("hermes", True), family).name == family


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("examples", with_slow([4, 300], slow=[300]))
def test_calls_are_read_as_the_template_writes_them(family, has_markers, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(CALLS, st.sampled_from(["", "I look."]), st.sets(st.integers(1, 200), max_size=8))
    def holds(calls, content, cuts):
        calls = calls[:1] if family == "llama" else calls
        tools = tools_for(calls)
        if family in TYPED:
            assume(all("\r" not in key for _, arguments in calls for key in arguments))
        text = written(family, content, calls)
        answer = answer_of(family, text, tools, has_markers=has_markers, cuts=() if has_markers else cuts)
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
        assert len({call.id for call in answer.calls}) == len(calls)
        keeps_content = family in ("hermes", "qwen_coder", "glm", "deepseek", "deepseek_v31")
        assert answer.content == (content if keeps_content else "")

    holds()


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_come_before_the_call_ends(family):
    text = written(family, "", [("f", {"a": "long " * 20})])
    events = events_of(family, text, TOOL)
    kinds = [type(event) for event in events if isinstance(event, CallBegun | CallArguments | CallEnded)]
    assert kinds[0] is CallBegun
    assert kinds[-1] is CallEnded
    assert kinds.count(CallArguments) > 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("examples", with_slow([6, 200], slow=[200]))
def test_an_answer_that_ends_within_a_call_loses_no_text(family, examples):
    whole = written(family, "", [("f", {"a": "x y"})])

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.integers(1, len(whole) - 1))
    def holds(length):
        text = whole[:length]
        answer = answer_of(family, text, TOOL, has_markers=False, cuts=(length // 2 + 1,))
        if not answer.calls:
            assert answer.content == text or family == "harmony"
            assert all(word in answer.content for word in text.split() if family == "harmony" and "{" in word)
        else:
            assert json.loads(answer.calls[0].arguments) in ({"a": "x y"}, {})

    holds()


MALFORMED = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": oops}\n</tool_call> more',
    "qwen_coder": "<tool_call>\nfunction f(1)\n</tool_call> more",
    "llama": '<|python_tag|>f.call(a="x") more',
    "mistral": '[TOOL_CALLS] {"f": 1} more',
    "mistral_args": "[TOOL_CALLS]f(1)\n more",
    "glm": '<tool_call>{"name": "f"}\n</tool_call> more',
    "deepseek": "<｜tool▁calls▁begin｜>x<｜tool▁sep｜>y more",
}


@pytest.mark.parametrize("family", MALFORMED)
@pytest.mark.parametrize("has_markers", [True, False])
def test_what_is_no_call_in_spite_of_its_marker_is_content(family, has_markers):
    answer = answer_of(family, MALFORMED[family], TOOL, has_markers=has_markers, cuts=() if has_markers else (3, 30))
    assert answer.calls == []
    assert answer.content.split() == MALFORMED[family].split() or family == "deepseek"
    assert "more" in answer.content


def test_a_call_that_becomes_malformed_ends_as_invalid_and_the_answer_goes_on():
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1 2}}\n</tool_call> more'
    events = events_of("hermes", text, TOOL)
    ended = [event for event in events if isinstance(event, CallEnded)]
    assert [event.is_valid for event in ended] == [False]
    answer = answer_of("hermes", text, TOOL)
    assert (answer.calls, answer.content) == ([], text)
    twice = answer_of("hermes", f"{text}\n{written('hermes', '', [('f', {'a': 'x'})])}", TOOL)
    assert [call.arguments for call in twice.calls] == ['{"a": "x"}']


def test_a_quoted_marker_is_no_call_where_the_tokenizer_has_one():
    tokenizer = tokenizer_of("hermes", True)
    parser = AnswerForm(tokenizer).parser((), TOOL)
    text = '```\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n```'
    answer = Answer()
    for character in text:
        answer.add(parser.add(Piece(0, character)))
    answer.add(parser.end(text))
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_without_tools_has_no_calls(family):
    answer = answer_of(family, written(family, "", [("f", {"a": "x"})]), [])
    assert answer.calls == []
    assert "x" in answer.content


def test_a_call_of_an_unknown_tool_is_a_call_only_where_a_marker_says_so():
    assert answer_of("hermes", written("hermes", "", [("g", {})]), TOOL).calls[0].name == "g"
    text = '{"name": "g", "parameters": {}}'
    assert answer_of("llama", text, TOOL).content == text


@pytest.mark.parametrize("text", ['{"a": 1}', '{"name": "x"', '{"names": {"name": "f"}}', "{", "[1]", "{}"])
@pytest.mark.parametrize("family", ["llama", "hermes"])
def test_json_that_is_no_call_is_content(family, text):
    answer = answer_of(family, text, TOOL)
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('"{\\"a\\": \\"x\\"}"', '{"a": "x"}'), ("null", "{}"), ('{"a": "one\ntwo"}', '{"a": "one\\ntwo"}')],
)
def test_arguments_that_models_write_otherwise_are_json(arguments, expected):
    for text in (f'{{"name": "f", "arguments": {arguments}}}', f'{{"arguments": {arguments}, "name": "f"}}'):
        answer = answer_of("hermes", f"<tool_call>{text}</tool_call>", TOOL)
        assert [call.arguments for call in answer.calls] == [expected]


def test_several_calls_of_llama_are_calls():
    text = '{"name": "f", "parameters": {"a": "x"}}; {"name": "f", "parameters": {}}'
    assert [call.arguments for call in answer_of("llama", text, TOOL).calls] == ['{"a": "x"}', "{}"]


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("\n<think>Hm.", "Hm.", ""),
        ("Yes </think> no", "", "Yes </think> no"),
        (" Yes.", "", " Yes."),
        ("<thin", "", "<thin"),
    ],
)
def test_a_thought_is_apart_from_the_content(text, reasoning, content, has_markers):
    for cuts in [(1, 4, 9)] if not has_markers else [()]:
        answer = answer_of("hermes", text, [], has_markers=has_markers, cuts=cuts)
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_a_thought_may_begin_in_the_prompt_and_end_with_a_call():
    prompt = tokenizer_of("hermes", True)("<think>\n")["input_ids"]
    answer = answer_of("hermes", "Hm.\n</think>\n\nYes.", TOOL, prompt=prompt)
    assert (answer.reasoning, answer.content) == ("Hm.", "Yes.")
    answer = answer_of("hermes", f"Hm.\n{written('hermes', '', [('f', {'a': 'x'})])}", TOOL, prompt=prompt)
    assert (answer.reasoning, len(answer.calls)) == ("Hm.", 1)


def test_channels_are_thought_preamble_calls_and_content():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": "x"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    answer = answer_of("harmony", text, TOOL)
    assert (answer.reasoning, answer.content) == ("Hm.", "I look.\n\nDone.")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": "x"}')]
    assert answer_of("harmony", text, []).content.startswith("I look.")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from(
            [
                *MARKERS,
                "<function=f>",
                "<parameter=a>",
                "</function>",
                '{"name": "f"',
                ', "arguments": ',
                "{}",
                "}",
                "f",
                "\n",
                '"',
                "]",
                ",",
            ]
        ),
        max_size=12,
    ).map("".join)
)
def test_any_answer_ends_in_events_whose_calls_are_json(family, text):
    for has_markers in (True, False):
        events = events_of(family, text, TOOL, has_markers=has_markers, cuts=() if has_markers else (5, 11))
        answer = Answer()
        answer.add(events)
        assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
        assert sum(isinstance(event, CallBegun) for event in events) == sum(
            isinstance(event, CallEnded) for event in events
        )
