"""A prompt's forward pauses often enough for others' tokens, and no more often."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetero_kv.serving.answer_pace import AnswerPace, ChunkPace
from hetero_kv.serving.turns import Others

GAP_S = 0.25


@pytest.fixture(name="clock")
def fixture_clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("hetero_kv.serving.answer_pace.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def passed(clock, token_s, tokens=2048):
    """The pace of a prompt's forward that could have paused once, after `tokens` tokens of a chunk."""
    answers = AnswerPace(GAP_S)
    pace = ChunkPace(answers, tokens)
    clock.now += token_s * tokens
    pace.pause(pace.chunk_tokens)
    pace.resume()
    return answers, pace


def test_chunks_stay_whole_while_nobody_waits_or_they_are_short(clock):
    _, pace = passed(clock, 1e-3)
    pace.plan(0, 0.0)
    assert pace.chunk_tokens == 2048
    _, pace = passed(clock, 1e-5)
    pace.plan(4, 0.03)
    assert pace.chunk_tokens == 2048


@pytest.mark.parametrize(("rows", "others"), [(4, Others()), (0, Others(rows=1)), (4, Others(rows=2, decode_s=0.02))])
def test_long_chunks_are_cut_until_several_fit_between_two_tokens(clock, rows, others):
    _, pace = passed(clock, 1e-4)
    pace.plan(rows, 0.03, others)
    assert 64 <= pace.chunk_tokens < 2048
    assert pace.chunk_tokens * 1e-4 * 5 <= GAP_S < pace.chunk_tokens * 1e-4 * 16
    _, pace = passed(clock, 1.0)
    pace.plan(rows, 0.03, others)
    assert pace.chunk_tokens == 64


def test_tokens_are_due_when_another_chunk_would_be_too_much(clock):
    answers, pace = passed(clock, 1e-5)
    answers.answered()
    clock.now += GAP_S - 0.02 - 0.03 - 0.04
    assert not pace.are_due(0.03)
    assert pace.are_due(0.07)
    clock.now += 0.04
    assert pace.are_due(0.03)
    answers.answered()
    assert not pace.are_due(0.03)


def test_a_prompt_goes_on_however_long_a_token_takes(clock):
    answers, pace = passed(clock, 1e-6)
    answers.answered()
    assert not pace.are_due(3.0)
    clock.now += 2.9
    assert not pace.are_due(3.0)
    clock.now += 0.2
    assert pace.are_due(3.0)


def test_the_longest_time_between_two_pauses_counts_and_is_forgotten(clock):
    answers, pace = passed(clock, 1e-4)
    long = answers.token_s
    for _ in range(3):
        clock.now += 0.001
        pace.pause(pace.chunk_tokens)
        pace.resume()
    assert 0.8 * long < answers.token_s < long
    for _ in range(200):
        clock.now += 0.001
        pace.pause(pace.chunk_tokens)
        pace.resume()
    assert answers.token_s == pytest.approx(0.001 / 2048, rel=0.1)


def test_a_layer_that_began_with_long_chunks_does_not_make_the_next_ones_shorter(clock):
    _, pace = passed(clock, 1e-4)
    pace.plan(4, 0.03)
    planned = pace.chunk_tokens
    assert planned < 2048
    for _ in range(5):
        clock.now += 1e-4 * 2048
        pace.pause(2048)
        pace.plan(4, 0.03)
        pace.resume()
    assert pace.chunk_tokens == planned


def test_pauses_are_no_time_of_the_prompt(clock):
    answers, pace = passed(clock, 1e-4)
    before = answers.token_s
    pace.pause(pace.chunk_tokens)
    clock.now += 5.0
    pace.resume()
    assert pace.paused_s == 5.0
    clock.now += 1e-4 * 2048
    pace.pause(pace.chunk_tokens)
    assert answers.token_s == pytest.approx(before)


def test_an_engine_whose_others_wait_for_tokens_has_shorter_turns(clock):
    _, pace = passed(clock, 1e-5)
    alone = pace.turn_s(Others())
    assert alone == pytest.approx(0.94 * GAP_S)
    assert pace.turn_s(Others(rows=1, decode_s=0.1)) < alone - 0.1
    assert pace.turn_s(Others(prompts=1)) == pytest.approx(alone / 2)
