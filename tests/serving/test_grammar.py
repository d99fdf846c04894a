"""Masks of grammars: every answer follows, ends where the grammar ends, and what cannot be compiled is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.serving.grammar import LONGEST, Grammars
from tests.support.tiny_tokenizers import byte_level

TOKENIZER = byte_level(add_prefix_space=False)
END = TOKENIZER.eos_token_id
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER) + 5, [END])


def drawn(mask, seed, most=400):
    """The text of tokens that are drawn among those that the mask allows."""
    generator, tokens = torch.Generator().manual_seed(seed), []
    while len(tokens) < most:
        logits = torch.zeros(len(TOKENIZER) + 5)
        # Short answers, so that the end comes.
        logits[END] = 3.0
        mask.apply(logits)
        token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
        assert logits[token] > -torch.inf
        mask.accept(token)
        if token == END:
            return TOKENIZER.decode(tokens)
        tokens.append(token)
    raise AssertionError("no end")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_an_answer_is_a_value_of_the_schema(seed):
    schema = {"enum": [{"a": [1, 2]}, "x", None, 3]}
    assert json.loads(drawn(GRAMMARS.schema(schema), seed)) in schema["enum"]


def test_a_regular_expression_and_a_lark_grammar_are_followed():
    assert drawn(GRAMMARS.regex("(ab){2}"), 0) == "abab"
    assert drawn(GRAMMARS.lark('start: "yes" | "no"'), 1) in ("yes", "no")


@pytest.mark.parametrize(
    "mask",
    [
        lambda: GRAMMARS.schema({"const": "a<|im_end|>"}),
        lambda: GRAMMARS.lark('%llguidance {"no_forcing": false}\nstart: "\\"a<|im_end|>\\""'),
        lambda: GRAMMARS.regex(r'"a<\|im_end\|>"'),
    ],
    ids=["schema", "lark", "regex"],
)
def test_a_text_that_spells_a_control_token_can_be_required(mask):
    assert drawn(mask(), 0) == '"a<|im_end|>"'


def test_tokens_beyond_the_tokenizers_are_forbidden():
    logits = torch.zeros(len(TOKENIZER) + 5)
    GRAMMARS.regex("(.|\n)*").apply(logits)
    assert (logits[len(TOKENIZER) :] == -torch.inf).all()
    assert logits[END] == 0


def test_a_token_that_the_grammar_forbids_is_refused():
    mask = GRAMMARS.regex("a")
    with pytest.raises(HeteroKVError, match="cannot be followed"):
        mask.accept(TOKENIZER.convert_tokens_to_ids("z"))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("schema", {"type": "nonsense"}),
        ("lark", "start: missing"),
        ("regex", "("),
        ("lark", "x" * (LONGEST + 1)),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind, source):
    with pytest.raises(ConfigError, match=r"cannot be compiled|give at most"):
        getattr(GRAMMARS, kind)(source)


def test_a_tokenizer_that_writes_a_space_before_texts_is_refused():
    spaced = byte_level(add_prefix_space=True)
    with pytest.raises(ConfigError, match="adds nothing to a text"):
        Grammars(spaced, len(spaced), [END]).json_object()
