"""Thoughts are separated from answers for any split of the text, dimmed, and switched off if the template can."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.chat.answer_text import AnswerText
from hetero_kv.chat.conversation import Conversation
from hetero_kv.cli import main
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.chat_template import thinking_variable
from hetero_kv.serving.answers import AnswerForm
from hetero_kv.serving.sampler import Choice, Sampler
from hetero_kv.serving.stream import Piece
from tests.chat.chat_in_a_terminal import CTRL_D, PATIENCE_S, PROMPT, ChatInATerminal
from tests.chat.chat_server import ChatServer
from tests.chat.tiny_conversations import FEW, TOKENIZER, conversation, new_model
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import TEMPLATE, byte_level
from tests.support.tool_templates import HARMONY

pytestmark = pytest.mark.usefixtures("one_thread")

#: What a model writes -> its thoughts, and the rest.
TEXTS = {
    "<think>\nHm < 3, so\n</think>\n\nIt was cut.": ("Hm < 3, so", "It was cut."),
    "It <thin was cut </think>.": ("", "It <thin was cut </think>."),
    "<think>never ends </thin": ("never ends </thin", ""),
    "<think>two</think> three": ("two", " three"),
}

THINKING = TEMPLATE.replace(
    "<|im_start|>assistant\n{%",
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{%",
)


@given(st.sampled_from(sorted(TEXTS)), st.sets(st.integers(1, 40)))
def test_thoughts_are_the_text_between_the_markers(text: str, cuts: set[int]):
    thoughts: list[str] = []
    rest: list[str] = []
    parser, answer = AnswerForm(TOKENIZER).parser([]), AnswerText(rest.append, thoughts.append)
    for start, end in pairwise([0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]):
        answer.add(parser.add(Piece(0, text[start:end])))
    answer.add(parser.end())
    assert (answer.reasoning, answer.content) == ("".join(thoughts), "".join(rest)) == TEXTS[text]


def test_a_text_has_thoughts_between_markers_of_its_own():
    pieces: list[str] = []
    parser, answer = AnswerForm(TOKENIZER).parser([]), AnswerText(pieces.append)
    answer.add(parser.add(Piece(0, "<think>\n\ntwo \n</think>three")))
    answer.add(parser.end())
    assert answer.text == "".join(pieces) == "<think>\ntwo\n</think>\n\nthree"


def test_thoughts_in_control_tokens_are_no_part_of_the_answer(monkeypatch):
    tokenizer = byte_level(add_prefix_space=False)
    markers = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer.add_tokens(markers, special_tokens=True)
    tokenizer.chat_template = HARMONY
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    tokens = tokenizer(said, add_special_tokens=False)["input_ids"]
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokens[-1])
    script = iter(tokens)
    monkeypatch.setattr(Sampler, "choose", lambda self, logits: Choice(next(script)))
    answer = Conversation(model, tokenizer).ask("hello")
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("hm", "yes", "end")
    assert answer.text == "<think>\nhm\n</think>\n\nyes"


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


def test_a_template_is_told_whether_to_think_and_what_it_opens_is_part_of_the_answer():
    model, tokenizer = new_model(), byte_level(add_prefix_space=False)
    tokenizer.chat_template = THINKING
    ends = {}
    for thinks in (None, True, False):
        talk, pieces = Conversation(model, tokenizer, thinks=thinks), []
        answer = talk.ask("hello", on_text=pieces.append, **FEW)
        talk.ask("again", **FEW)
        said = tokenizer.decode(talk._state.tokens)
        ends[thinks] = said.count("</think>"), answer.text.startswith("<think>\n"), "".join(pieces) == answer.text
    assert ends == {None: (0, True, True), True: (0, True, True), False: (2, False, True)}


def test_thinking_is_refused_where_the_template_knows_nothing_of_it(model):
    with pytest.raises(HeteroKVError, match="template cannot switch thinking on or off; leave --thinking out"):
        conversation(model, thinks=False)


def test_in_the_chat_thoughts_are_dim_and_the_answer_is_not(thinking_model_folder: Path, chat_server: ChatServer):
    chat = ChatInATerminal(thinking_model_folder, "--thinking", "on", server=chat_server)
    try:
        chat.until(PROMPT)
        for _ in range(2):
            chat.type("yes\n")
            chat.until("tokens, first after")
            # The unfinished answer is drawn again.
            *_, thought, answer = re.findall(r"(\x1b\[[\d;]*m)?(hm well|yes indeed)(?!.*\2)", chat.drawn, re.DOTALL)
            assert thought == ("\x1b[2;3m", "hm well")
            assert answer == ("", "yes indeed")
            assert "think>" not in chat.drawn
            chat.until(PROMPT)
        chat.type(CTRL_D)
        assert chat.process.wait(PATIENCE_S) == 0
    finally:
        chat.close()


def test_a_model_that_is_told_not_to_think_answers_at_once(
    thinking_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    chat = "chat", "--model", str(thinking_model_folder), "--dtype", "float32", "--mode", "normal"
    assert main([*chat, "--prompt", "yes", "--thinking", "off"]) == 0
    assert capsys.readouterr().out == "yes indeed\n"
