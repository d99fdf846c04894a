"""Short prompts overtake long ones, whose delay is bounded, and no answer changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetero_kv import SamplingParams
from tests.serving.tiny_engine import PROMPTS, alone, answered, engine_of
from tests.support.slow_variants import with_few
from tests.support.small_recipes import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT, LONG, LONGEST = PROMPTS[0], PROMPTS[2], PROMPTS[3]
ANSWER = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture
def engine():
    with slow_engine() as engine:
        yield engine


def slow_engine(recipe="dense", **settings):
    """An engine that computes prompts in parts of 16 tokens, and takes 1,000 s for each token in its own estimates."""
    engine = engine_of(recipe, part=16, **settings)
    engine._scheduler._order._speed = SimpleNamespace(tokens_per_s=1e-3)
    return engine


def steps(engine, count):
    for _ in range(count):
        assert engine.step()


def order_of_first_tokens(engine, streams):
    """The numbers of the streams, in the order in which their first tokens come."""
    order = []
    while len(order) < len(streams):
        assert engine.step()
        order += [number for number, each in enumerate(streams) if each._pieces and number not in order]
    return order


@pytest.mark.parametrize("recipe", with_few(RECIPES, ("dense", "quest", "adaptive", "snapkv")))
def test_a_short_prompt_overtakes_a_long_one_and_no_answer_changes(recipe):
    with slow_engine(recipe) as engine:
        long = engine.generate(LONGEST, ANSWER)
        steps(engine, 2)
        streams = [long, engine.generate(SHORT, ANSWER), engine.generate(PROMPTS[1], ANSWER)]
        if engine._scheduler.forward.splits_prompts:
            assert order_of_first_tokens(engine, streams) == [1, 2, 0]
        answers = [each.result().tokens for each in streams]
        assert answers == [alone(engine, tokens, 8) for tokens in (LONGEST, SHORT, PROMPTS[1])]


def test_a_prompt_that_comes_after_the_long_ones_own_time_waits_for_it(engine):
    engine._scheduler._order._speed.tokens_per_s = 1e9
    long = engine.generate(LONGEST, ANSWER)
    steps(engine, 2)
    assert order_of_first_tokens(engine, [engine.generate(PROMPTS[1], ANSWER), long]) == [1, 0]


def test_a_more_urgent_prompt_comes_first_however_long_it_is(engine):
    short = engine.generate(LONG, ANSWER, priority=1)
    steps(engine, 2)
    assert order_of_first_tokens(engine, [short, engine.generate(LONGEST, ANSWER)]) == [1, 0]


def test_a_question_about_a_known_document_overtakes_a_new_one(engine):
    answered(engine, LONGEST)
    new = engine.generate(LONG, ANSWER)
    steps(engine, 2)
    assert order_of_first_tokens(engine, [new, engine.generate([*LONGEST, 7, 8], ANSWER)]) == [1, 0]


def test_questions_about_a_document_follow_the_one_that_computes_it(engine):
    other = [(token + 1) % 97 for token in LONG]
    prompts = [[*LONG, 7], [*other, 7], [*LONG, 8], [*other, 8], [*LONG, 9]]
    streams = [engine.generate(prompt, ANSWER) for prompt in prompts]
    assert order_of_first_tokens(engine, streams) == [0, 2, 4, 1, 3]
    assert [each.result().cached_tokens for each in streams] == [0, 0, 130, 130, 130]


def test_requests_in_progress_are_no_more_than_max_batch():
    with slow_engine(max_batch=2) as engine:
        streams = [engine.generate(tokens, ANSWER) for tokens in (LONGEST, LONG, PROMPTS[1], SHORT)]
        while engine.step():
            assert len(engine._queues.running) + len(engine._queues.prefilling) <= 2
        assert all(each.is_done for each in streams)


def test_an_overtaken_prompt_keeps_its_blocks():
    # Blocks for the long prompt, and for a short one beside it, but not for two long ones.
    with slow_engine(kv_tokens=280, kept_prefixes=0) as engine:
        long = engine.generate(LONGEST, ANSWER)
        steps(engine, 2)
        streams = [engine.generate(LONG, ANSWER), engine.generate(SHORT, ANSWER), long]
        assert order_of_first_tokens(engine, streams) == [1, 2, 0]
        assert [each.result().tokens for each in streams] == [alone(engine, each, 8) for each in (LONG, SHORT, LONGEST)]


def test_a_cancelled_prompt_in_progress_ends_though_another_is_computed(engine):
    long = engine.generate(LONGEST, ANSWER)
    steps(engine, 2)
    short = engine.generate(PROMPTS[1], ANSWER)
    steps(engine, 1)
    long.cancel()
    steps(engine, 1)
    assert engine._queues.prefilling == [engine._queues.all[0]]
    assert short.result().tokens == alone(engine, PROMPTS[1], 8)
