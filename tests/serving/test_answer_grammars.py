"""Grammars of calls and values: what they allow is read as such, and impossible choices are refused."""

from __future__ import annotations

import pytest

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.answers import AnswerForm, chosen_tool, format_names
from tests.serving.answer_forms import FAMILIES, tokenizer_of, tool, written


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_grammar_allows_is_a_call(family):
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    tokenizer = tokenizer_of(family, True)
    form = AnswerForm(tokenizer)
    properties = {"a": {"type": "string"}, "n": {"type": "integer"}}
    tools = [tool(**properties), tool("g")]
    matched = from_tokenizer(tokenizer)
    grammar = form.call_grammar((), tools, {"type": "function", "function": {"name": "f"}})
    assert not llguidance.LLMatcher.validate_grammar(grammar, matched)
    # Ids of calls are ours.
    text = written(family, "", [("f", {"a": "x", "n": 5})]).replace(', "id": "123456789"', "")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    matcher = llguidance.LLMatcher(matched, grammar)
    assert matcher.validate_tokens(tokens) == len(tokens), (grammar, text)
    matcher.consume_tokens(tokens)
    assert matcher.is_accepting()
    other = tokenizer("Hello", add_special_tokens=False)["input_ids"]
    assert llguidance.LLMatcher(matched, grammar).validate_tokens(other) == 0
    opened = tokenizer("<think>\n", add_special_tokens=False)["input_ids"]
    assert not llguidance.LLMatcher.validate_grammar(form.call_grammar(opened, tools), matched)
    assert form.call_grammar((), tools, "auto") is form.call_grammar((), tools, "none") is None


def test_a_value_of_a_schema_comes_behind_an_open_thought():
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    tokenizer = tokenizer_of("hermes", True)
    matched = from_tokenizer(tokenizer)
    opened = tokenizer("<think>\n", add_special_tokens=False)["input_ids"]
    for prompt, text in ((opened, 'Hm.\n</think>\n\n{"a":1}'), ((), '{"a":1}')):
        grammar = AnswerForm(tokenizer).value_grammar(prompt, {"type": "object", "required": ["a"]})
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        matcher = llguidance.LLMatcher(matched, grammar)
        assert matcher.validate_tokens(tokens) == len(tokens)
        matcher.consume_tokens(tokens)
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("choice", "names", "named"),
    [
        ("required", [], "there are no tools"),
        ("any", ["f"], "tool_choice is 'any'; give"),
        ({"type": "function"}, ["f"], "tool_choice is .* give"),
        ({"type": "function", "function": {"name": "g"}}, ["f"], "names the tool 'g'; there are f"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_by_name(choice, names, named):
    with pytest.raises(HeteroKVError, match=named):
        chosen_tool(choice, names)


def test_an_unknown_form_is_refused_by_name():
    with pytest.raises(HeteroKVError, match=r"no form 'x'; give one of .*hermes"):
        AnswerForm(tokenizer_of("hermes", True), "x")
    assert set(format_names()) == set(FAMILIES)
