"""What the chat shows beside the answers."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console, Group

from hetero_kv.chat.display import layer_ranges
from hetero_kv.chat.interrupt import Interrupt
from hetero_kv.chat.prefill_bar import LONG_PROMPT_TOKENS, PrefillBar


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


def test_after_ctrl_c_the_bar_says_what_it_waits_for():
    interrupt = Interrupt()
    bar = PrefillBar(interrupt)
    bar.report(2, 4, 1000, 2000)
    interrupt.requested = True
    assert "stopping after this chunk" in shown(bar)


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
