"""After a failure at any place of a step all other requests go on as if nothing had happened, and no block leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hetero_kv import HeteroCache, SamplingParams
from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.sampler import Sampler
from tests.engine.faults import RAISED, Faults
from tests.serving.number_tokenizer import Numbers
from tests.serving.short_memory import require_all_free
from tests.serving.tiny_engine import PROMPTS, alone, engine_of, pause_everywhere
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread")

ANSWER = SamplingParams(max_new_tokens=14, ignore_eos=True)
#: Three requests, the last of which has a long prompt.
LOAD = PROMPTS[0], PROMPTS[4], PROMPTS[1]


def places_of_a_step(engine, faults):
    """Run a step, which may fail as `faults` says; an interrupt leaves it unfinished."""
    try:
        # In this thread, whose calls are traced.
        faults.run(engine._loop._step)
    except KeyboardInterrupt:
        assert faults.where is not None
    return faults


def failed_at_random_places(recipe, times, **settings):
    """Fail random steps of loads at so many random places; returns how often each kind of error was raised."""
    drawn, raised = random.Random(f"{recipe} {times}"), Counter()
    with engine_of(recipe, longest_gap_s=1e-6, kept_prefixes=0, **settings) as engine:
        pause_everywhere(engine)
        expected = [alone(engine, tokens, ANSWER.max_new_tokens) for tokens in LOAD]
        places = 400
        while sum(raised.values()) < times:
            streams = [engine.generate(tokens, ANSWER) for tokens in LOAD]
            for _ in range(drawn.randrange(14)):
                engine.step()
            error = drawn.choice(RAISED)
            faults = places_of_a_step(engine, Faults(drawn.randrange(places), error))
            places = max(2, faults.passed) if faults.where is None else places
            raised[type(error).__name__] += faults.where is not None
            failed = []
            for stream, tokens in zip(streams, expected, strict=True):
                try:
                    assert stream.result().tokens == tokens, faults.where
                except (MemoryError, RuntimeError, HeteroKVError) as found:
                    failed.append(found)
            assert len(failed) <= (faults.where is not None and error is not RAISED[-1]), (faults.where, failed)
            for allocator in engine._store.allocators.values():
                assert allocator.free_blocks == allocator.num_blocks, faults.where
    return raised


def test_some_places():
    failed_at_random_places("quest", 4)


@pytest.mark.parametrize("recipe", with_few(["ktransformers", "snapkv"]))
def test_a_part_that_is_passed_again_is_observed_once(recipe, monkeypatch):
    with engine_of(recipe, longest_gap_s=1e-6, part=8) as engine:
        forward, calls = engine._scheduler.forward, []
        mixed, logits = forward.mixed, forward._logits

        def failing(cache, token_ids):
            logits(cache, token_ids)
            raise MemoryError

        def fails_in_turn(*args):
            calls.append(args)
            with monkeypatch.context() as patch:
                if len(calls) % 2:
                    patch.setattr(forward, "_logits", failing)
                return mixed(*args)

        monkeypatch.setattr(forward, "mixed", fails_in_turn)
        answer = SamplingParams(max_new_tokens=40, ignore_eos=True)
        streams = [engine.generate(tokens, answer) for tokens in PROMPTS[:4]]
        assert [stream.result().tokens for stream in streams] == [alone(engine, tokens, 40) for tokens in PROMPTS[:4]]
        assert len(calls) > 4


def test_an_interrupt_while_tokens_are_chosen_loses_none(monkeypatch):
    with engine_of("quest") as engine:
        streams = [engine.generate(tokens, ANSWER) for tokens in LOAD]
        for _ in range(6):
            engine.step()
        choose, calls = Sampler.choose, []

        def interrupted(sampler, logits):
            calls.append(sampler)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return choose(sampler, logits)

        monkeypatch.setattr(Sampler, "choose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, tokens, ANSWER.max_new_tokens) for tokens in LOAD]


def test_an_answer_whose_text_cannot_be_ended_fails_alone(monkeypatch):
    with engine_of("quest", kept_prefixes=0) as engine:
        good, bad = (engine.generate(tokens, ANSWER) for tokens in LOAD[:2])
        while len(bad._pieces) < 4:
            engine.step()
        decode, known = Numbers.decode, [piece.token for piece in bad._pieces]

        def fails(tokenizer, tokens, **named):
            if tokens and tokens[-1] == known[-1] and len(tokens) == 1:
                raise ZeroDivisionError("a fault of a tokenizer")
            return decode(tokenizer, tokens, **named)

        monkeypatch.setattr(Numbers, "decode", fails)
        bad.cancel()
        engine.step()
        monkeypatch.undo()
        with pytest.raises(ZeroDivisionError):
            bad.result()
        assert good.result().tokens == alone(engine, LOAD[0], ANSWER.max_new_tokens)
        require_all_free(engine)


def test_a_prefix_that_cannot_be_cut_keeps_no_block_while_its_error_is_held(monkeypatch, tmp_path):
    known = PROMPTS[2]
    departing = [*known[:70], (known[70] + 1) % 97]
    for settings in ({}, {"kept_prefixes": 0, "context_folder": tmp_path}):
        with engine_of("dense", **settings) as engine:
            engine.generate(known, ANSWER).result()
            with monkeypatch.context() as patch:
                patch.setattr(HeteroCache, "crop", raising(MemoryError("no memory")))
                stream = engine.generate(departing, ANSWER)
                while engine.step():
                    pass
            if settings:
                # It was on the disk, and the prompt is computed.
                assert stream.result().reuse.reason == "not_loaded"
            else:
                assert isinstance(stream._error, MemoryError)
            while engine._prefixes.drop_oldest():
                pass
            require_all_free(engine)


def test_guesses_that_cannot_be_made_end_guessing_and_no_answer(monkeypatch, caplog):
    with engine_of("quest", speculation="lookup") as engine:
        monkeypatch.setattr(engine._speculation, "drafts", raising(MemoryError("no memory")))
        streams = [engine.generate(tokens, ANSWER) for tokens in LOAD]
        answers = [stream.result() for stream in streams]
        assert [each.tokens for each in answers] == [alone(engine, tokens, ANSWER.max_new_tokens) for tokens in LOAD]
    assert "guesses were not verified (MemoryError: no memory)" in caplog.text


def raising(error):
    def act(*args, **named):
        raise error

    return act


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dense", "quest", "ktransformers", "snapkv", "retroinfer", "shadowkv"])
@pytest.mark.parametrize("settings", [{"part": 8}, {}], ids=["small parts", "pauses"])
def test_a_hundred_places(recipe, settings):
    assert len(failed_at_random_places(recipe, 100, **settings)) == 3
