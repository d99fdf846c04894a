"""Where tokens are in their text: every character belongs to the tokens that have bytes of it."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.serving.token_spans import token_spans
from tests.support.tiny_tokenizers import END, byte_level, sentencepiece

BYTES = byte_level(add_prefix_space=False)
TEXTS = st.text(st.sampled_from("ab <|hello\nuser €ß漢😀\u0301"), max_size=30)


def spans_by_bytes(text, tokens):
    """The characters in which the tokens of a byte-level vocabulary, a letter for each byte, have bytes."""
    of_bytes = [place for place, letter in enumerate(text) for _ in letter.encode()]
    ends = list(accumulate(len(BYTES.convert_ids_to_tokens(token)) for token in tokens))
    return [(of_bytes[begin], of_bytes[end - 1] + 1) for begin, end in zip([0, *ends], ends, strict=False)]


@given(TEXTS)
def test_a_token_has_the_characters_of_which_it_has_bytes(text):
    tokens = BYTES.encode(text, add_special_tokens=False)
    assert token_spans(BYTES, tokens) == spans_by_bytes(BYTES.decode(tokens), tokens)


@given(text=TEXTS, scheme=st.sampled_from(["prepend", "first", "never"]))
def test_spans_cover_the_text_in_order(text, scheme):
    tokenizer = sentencepiece(scheme)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    decoded, spans = tokenizer.decode(tokens, skip_special_tokens=True), token_spans(tokenizer, tokens)
    assert len(spans) == len(tokens)
    assert spans == sorted(spans)
    assert set(range(len(decoded))) == {place for start, stop in spans for place in range(start, stop)}


def test_bytes_of_one_character_share_it_and_special_tokens_have_none():
    tokens = BYTES.encode("a€", add_special_tokens=False)
    assert token_spans(BYTES, tokens) == [(0, 1), (1, 2), (1, 2), (1, 2)]
    end = BYTES.convert_tokens_to_ids(END)
    assert token_spans(BYTES, [tokens[0], end, tokens[0]]) == [(0, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("count", [1, 2])
def test_bytes_that_never_become_a_character_are_in_the_text(count):
    tokens = BYTES.encode("a€", add_special_tokens=False)[: 1 + count]
    assert token_spans(BYTES, tokens) == [(0, 1), *[(1, 2)] * count]
    assert token_spans(BYTES, []) == []
