"""Thoughts told from answers, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.chat.thinking import Thoughts
from hetero_kv.models.chat_template import thinking_variable

TEXTS = {
    "<think>\nHm < 3, so\n</think>\n\nIt was cut.": ["Hm < 3, so\n", "It was cut."],
    "It <thin was cut </think>.": ["", "It <thin was cut </think>."],
    "<think>never ends </thin": ["never ends </thin", ""],
    "one <think>two</think> three<think>four</think>": ["twofour", "one  three"],
}


@given(st.sampled_from(sorted(TEXTS)), st.sets(st.integers(1, 40)))
def test_thoughts_are_what_stands_between_the_signs(text: str, cuts: set[int]):
    said = {True: "", False: ""}

    def write(piece: str, is_thinking: bool) -> None:
        said[is_thinking] += piece

    thoughts = Thoughts(write)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for start, end in pairwise(places):
        thoughts.add(text[start:end])
    thoughts.end()
    assert [said[True], said[False]] == TEXTS[text]


class Tokenizer:
    """Has this template."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self) -> str:
        return self.chat_template


def test_the_switch_has_one_of_two_names():
    for template, name in (
        ("{%- if enable_thinking is defined and enable_thinking is false %}", "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}<think>{% endif %}", "thinking"),
    ):
        assert thinking_variable(Tokenizer(template)) == name
