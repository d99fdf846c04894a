"""The speed that an engine reports is that of new prompts, whatever else it answers."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import pytest

from hetero_kv import SamplingParams
from hetero_kv.serving.prompt_speed import FEWEST, PromptSpeed
from tests.serving.tiny_engine import PROMPTS, call_before_parts, engine_of


class Prompt:
    """Something that a weak reference may be of."""


def test_the_fastest_of_the_last_prompts_counts():
    speed = PromptSpeed()
    assert speed.tokens_per_s is None
    speed.passed(Prompt(), 200, 100.0, is_last=True)
    assert speed.tokens_per_s == 2.0
    prompt = Prompt()
    speed.passed(prompt, 100, 1.0, is_last=False)
    assert speed.tokens_per_s == 2.0
    speed.passed(prompt, 100, 3.0, is_last=True)
    assert speed.tokens_per_s == 50.0
    for _ in range(8):
        speed.passed(Prompt(), 200, 8.0, is_last=True)
    assert speed.tokens_per_s == 25.0


def test_short_prompts_and_those_that_did_not_end_leave_it_as_it_is():
    speed, cancelled = PromptSpeed(), Prompt()
    speed.passed(Prompt(), FEWEST, 1.0, is_last=True)
    for _ in range(20):
        speed.passed(Prompt(), 20, 1.0, is_last=True)
    speed.passed(cancelled, 500, 0.1, is_last=False)
    speed.passed(Prompt(), FEWEST - 1, 100.0, is_last=True)
    assert speed.tokens_per_s == FEWEST
    speed.passed(cancelled, 500, 0.1, is_last=False)
    del cancelled
    gc.collect()
    assert speed._prompt() is None


def test_questions_about_a_known_document_do_not_make_an_engine_seem_slow(monkeypatch):
    # A token of a part takes a millisecond, and every part half a second more.
    clock = SimpleNamespace(now=0.0)
    own = SimpleNamespace(perf_counter=lambda: clock.now, monotonic=time.monotonic)
    monkeypatch.setattr("hetero_kv.serving.scheduler.time", own)
    monkeypatch.setattr("hetero_kv.serving.answer_pace.time", own)

    def pass_time(part):
        clock.now += 0.5 + 0.001 * (part.stop - part.start)

    with engine_of("dense") as engine:
        call_before_parts(engine, pass_time)
        document = PROMPTS[3]
        one = SamplingParams(max_new_tokens=1)
        assert engine.generate(document, one).result().cached_tokens == 0
        speed = engine.status().prefill_tokens_per_s
        assert speed == pytest.approx(len(document) / (0.5 + 0.001 * len(document)))
        for number in range(3):
            assert engine.generate([*document, number], one).result().cached_tokens == len(document)
        assert engine.status().prefill_tokens_per_s == speed
