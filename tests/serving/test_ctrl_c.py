"""Ctrl-C while a program computes steps of an engine ends the wait, and no token is lost or repeated."""

from __future__ import annotations

import os
import signal
from itertools import count

import pytest

from hetero_kv.serving.part_size import SMALL
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of
from tests.support.slow_variants import combined


@pytest.fixture
def heard_interrupts():
    """Ctrl-C raises KeyboardInterrupt, also in a process that began with it ignored, as those in the background do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("kind", "place"), combined(["decode", "prefill", "mixed"], ["before", "behind"]))
def test_the_next_step_goes_on_where_the_interrupted_one_was(kind, place, monkeypatch, heard_interrupts):
    is_before = place == "before"
    # Small parts pass in mixed forwards.
    with engine_of("quest", part=SMALL + 1 if kind == "prefill" else 16) as engine:
        forward, calls, interrupts = engine._scheduler.forward, count(), 0
        original = getattr(forward, kind)

        def interrupted(*arguments):
            is_now = next(calls) % 3 == 0
            if is_now and is_before:
                os.kill(os.getpid(), signal.SIGINT)
            result = original(*arguments)
            if is_now and not is_before:
                os.kill(os.getpid(), signal.SIGINT)
            return result

        monkeypatch.setattr(forward, kind, interrupted)
        streams = [engine.generate(tokens, GREEDY) for tokens in PROMPTS[:3]]
        is_done = False
        while not is_done:
            try:
                engine.step()
                is_done = all(stream.is_done for stream in streams)
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts >= 1
        monkeypatch.undo()
        assert [stream.result().tokens for stream in streams] == [alone(engine, tokens) for tokens in PROMPTS[:3]]
