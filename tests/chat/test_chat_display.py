"""The chat's banner, tables and messages."""

from __future__ import annotations

import io
import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from rich.console import Console, Group

from hetero_kv.chat.answer import Turn
from hetero_kv.chat.display import banner, context_table, layer_ranges
from hetero_kv.chat.interrupt import Interrupt
from hetero_kv.chat.prefill_bar import LONG_PROMPT_TOKENS, PrefillBar
from hetero_kv.chat.question import ChatQuestion
from hetero_kv.documents.reading import Document

if TYPE_CHECKING:
    from hetero_kv.chat.session import ChatSession


def shown(bar: PrefillBar) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(Group(*bar.get_renderables()))
    return console.file.getvalue().strip()  # type: ignore[attr-defined]


def test_a_long_prefill_shows_layer_and_speed():
    bar = PrefillBar(Interrupt())
    bar.report(2, 4, 1000, 2000)
    assert "layer 3/4" in shown(bar)
    assert "tokens/s" in shown(bar)
    assert bar.tasks[0].percentage == pytest.approx(100 * 2.5 / 4)


def test_size_and_time_left_are_shown_as_soon_as_they_are_known():
    bar = PrefillBar(Interrupt())
    bar.tasks[0].start_time, bar.tasks[0]._get_time = 0.0, lambda: 5.0
    bar.report(0, 4, 0, 30_000)
    assert "layer 1/4 30,000 tokens" in " ".join(shown(bar).split())
    bar.report(0, 4, 15_000, 30_000)
    # An eighth, as if of all layers, in five seconds.
    assert shown(bar).endswith("750 tokens/s 0:00:35")


def test_a_layer_that_is_done_is_counted_once():
    bar = PrefillBar(Interrupt())
    bar.report(3, 4, 2000, 2000)
    assert bar.tasks[0].percentage == pytest.approx(75)
    bar.report(4, 4, 2000, 2000)
    assert bar.finished


def test_a_short_prefill_shows_nothing():
    bar = PrefillBar(Interrupt())
    bar.report(2, 4, 10, LONG_PROMPT_TOKENS)
    assert shown(bar) == ""


def test_after_ctrl_c_the_bar_names_the_pending_step():
    interrupt = Interrupt()
    bar = PrefillBar(interrupt)
    bar.report(2, 4, 1000, 2000)
    interrupt.requested = True
    assert "stopping after this chunk" in shown(bar)


def test_the_banner_says_which_saved_conversation_goes_on():
    def shown_of(context: str | None) -> str:
        talk = SimpleNamespace(turns=(Turn(10, 2), Turn(1_000, 0)), context_tokens=1_012)
        loaded = SimpleNamespace(name="tiny", model=SimpleNamespace(dtype="torch.float32", device="cpu"))
        engine = SimpleNamespace(resolved_threads=lambda: 2)
        options = SimpleNamespace(mode="normal", context=context)
        session = SimpleNamespace(
            loaded=loaded, options=options, rules_name=None, engine=engine, capacity=4_096, injection=None,
            conversation=talk,
        )  # fmt: skip
        console = Console(file=io.StringIO(), width=80)
        console.print(banner(cast("ChatSession", session)))
        return console.file.getvalue()  # type: ignore[attr-defined]

    assert "goes on" not in shown_of(None)
    assert "continues notes: 1,012 tokens, 2 turns\n" in shown_of("notes")


def test_the_context_is_shown_turn_by_turn_with_what_waits():
    turns = tuple(Turn(10 * number, number) for number in range(1, 13))
    talk = SimpleNamespace(turns=turns, context_tokens=858, text_tokens=len)
    session = cast("ChatSession", SimpleNamespace(conversation=talk, capacity=1000))
    questions = [ChatQuestion(prompt=f"What is {number}?") for number in range(5, 13)]
    waiting = ChatQuestion((Document("a.txt", "word"), Document("huge.txt", "a" * 32_001)))
    console = Console(file=io.StringIO(), width=80)
    console.print(context_table(session, questions, waiting))
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert rows[:5] == ["turn tokens of the context", "1-2 33 3.3%", "3 30 3.0%", "its answer 3 0.3%", "4 40 4.0%"]
    assert rows[6] == "5 What is 5? 50 5.0%"
    assert rows[-4:] == ["all 858 85.8%", "left 142 14.2%", "waits: a.txt 4 0.4%", "waits: huge.txt more than fit"]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0, 1, 2], "layers 0-2"),
        ([0, 2, 3, 4, 7], "layers 0, 2-4, 7"),
        ([5], "layer 5"),
        ([0, 1, "lm_head"], "layers 0-1, lm_head"),
        (["model.norm"], "model.norm"),
    ],
)
def test_layer_numbers_are_shown_as_ranges(layers, text):
    assert layer_ranges(layers) == text


def test_the_first_ctrl_c_is_remembered_and_the_second_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    interrupt = Interrupt()
    with interrupt.catching():
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
