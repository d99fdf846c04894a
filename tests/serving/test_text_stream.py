"""A stream's text is the tokenizer's, in whole characters, and ends before a stop text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.serving.text_stream import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is a special token without text."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def streamed(tokens, stop=(), tokenizer=None):
    stream = TextStream(tokenizer or Bytes(), stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.found is not None:
            return stream, pieces
    pieces.append(stream.end())
    return stream, pieces


def test_a_character_comes_whole():
    stream, pieces = streamed("aé€😀b".encode())
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]
    assert stream.text == "aé€😀b"


def test_bytes_that_are_no_character_come_in_the_end():
    stream, pieces = streamed([0x61, 0xFF, 0x62, 0xF0, 0x9F])
    assert stream.text == "a\ufffdb\ufffd"
    assert pieces[:3] == ["a", "", "\ufffdb"]
    assert streamed([0xFF] * 40)[0].text == "\ufffd" * 40


@pytest.mark.parametrize("text", ["\ufffd\ufffd😀", "a\ufffd\ufffd\ufffd日本", "\ufffd" * 9 + "é"])
def test_characters_behind_replacement_characters_are_not_lost(text):
    stream, pieces = streamed(text.encode())
    assert stream.text == text == "".join(pieces)


def test_characters_that_tokens_split_are_not_lost_however_many_there_are():
    class Pairs:
        """Token 0 is the first byte of "é", token 2 its last, and token 1 a last byte and the next first one."""

        def decode(self, tokens, skip_special_tokens):
            return b"".join([b"\xc3", b"\xa9\xc3", b"\xa9"][token] for token in tokens).decode(errors="replace")

    assert streamed([0, *[1] * 20, 2], tokenizer=Pairs())[0].text == "é" * 21


def test_special_tokens_have_no_text():
    assert streamed([97, 256, 98, 256])[0].text == "ab"


def test_text_that_a_stop_may_begin_with_waits():
    stream, pieces = streamed(b"one stone", ("stop", "tone"))
    assert pieces == ["o", "n", "e", " ", "", "", "", "s", ""]
    assert (stream.text, stream.found) == ("one s", "tone")
    assert streamed(b"one sto", ("stop",))[1][-2:] == ["", "sto"]


def test_the_stop_text_that_begins_first_ends_the_answer():
    stream, _ = streamed(b"abcd", ("cd", "bcd"))
    assert (stream.text, stream.found) == ("a", "bcd")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abé😀", max_size=30), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_what_streams_is_the_text_before_the_first_stop(text, stops):
    stream, pieces = streamed(text.encode(), stops)
    places = [(text.find(stop), stop) for stop in stops if stop in text]
    # Of stops that end later, none is seen: the answer has ended.
    ends = min((place + len(stop) for place, stop in places), default=None)
    assert "".join(pieces) == stream.text
    if ends is None:
        assert (stream.text, stream.found) == (text, None)
    else:
        assert stream.found in stops
        assert not any(stop in stream.text for stop in stops)
        assert text.startswith(stream.text + stream.found)
        assert len(stream.text + stream.found) <= ends + max(map(len, stops))


@pytest.mark.model
def test_a_real_tokenizers_text_streams_as_it_decodes_whole(smollm2):
    drawn = random.Random(1)
    for _ in range(20):
        tokens = [drawn.randrange(len(smollm2.tokenizer)) for _ in range(60)]
        stream, _ = streamed(tokens, tokenizer=smollm2.tokenizer)
        assert stream.text == smollm2.tokenizer.decode(tokens, skip_special_tokens=True)
