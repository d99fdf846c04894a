"""Where memory is short, requests wait on the disk, and still get the tokens that they get alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from hetero_kv import HeteroCache, SamplingParams
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.layer import RetrievalLayer
from tests.serving.short_memory import AHEAD, LOAD, LONG, ROOM, require_all_free, step_until, swapped_requests
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few
from tests.support.small_recipes import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread", "short_reserve")


# -- the same tokens


@pytest.mark.parametrize(
    ("recipe", "architecture"),
    with_few(
        [*((recipe, "llama") for recipe in ("adaptive", "dense", "snapkv", "shadowkv")), ("quest", "qwen3_5_text")]
    ),
)
def test_a_preempted_request_gets_the_tokens_that_it_gets_alone(recipe, architecture, preempted):
    with engine_of(recipe, architecture, kv_tokens=ROOM, kept_prefixes=0) as engine:
        answers = [stream.result().tokens for stream in [engine.generate(tokens, LONG) for tokens in LOAD]]
        assert preempted
        assert answers == [alone(engine, tokens, LONG.max_new_tokens) for tokens in LOAD]
        require_all_free(engine)


def test_draws_penalties_and_probabilities_go_on_where_they_were(preempted):
    drawn = replace(
        LONG, temperature=1.3, top_p=0.95, seed=5, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
        logprobs=2,
    )  # fmt: skip
    found = []
    for tokens_of_all in (None, ROOM):
        with engine_of("dense", kv_tokens=tokens_of_all, kept_prefixes=0) as engine:
            found.append([stream.result() for stream in [engine.generate(tokens, drawn) for tokens in LOAD]])
        assert bool(preempted) == (tokens_of_all is not None)
    for with_room, without in zip(*found, strict=True):
        assert with_room.tokens == without.tokens
        assert with_room.text == without.text
        for one, other in zip(with_room.pieces, without.pieces, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.alternatives.keys() == other.alternatives.keys()


@pytest.mark.parametrize(
    ("recipe", "architecture"),
    with_few(
        [*((recipe, "llama") for recipe in RECIPES), ("quest", "qwen3_5_text"), ("dense", "lfm2")],
        [("infinipot", "llama"), ("quest", "qwen3_5_text")],
    ),
)
def test_a_restored_request_computes_the_same_logits_bit_for_bit(recipe, architecture):
    with engine_of(recipe, architecture, kept_prefixes=0) as engine:
        scheduler, found = engine._scheduler, []
        decode = scheduler.forward.decode
        for steps in ((), (1, 4, 5, 9)):
            logits = []
            scheduler.forward.decode = lambda *rows, logits=logits: logits.append(decode(*rows)) or logits[-1]
            stream = engine.generate(PROMPTS[3], replace(LONG, max_new_tokens=14))
            while not stream.is_done:
                if len(logits) in steps and scheduler.queues.running:
                    assert scheduler.admission.preempt(scheduler.queues.running[0])
                engine.step()
            found.append(logits)
        assert len(found[0]) == 13
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# -- who enters, and who is preempted


def test_more_requests_run_than_their_longest_answers_would_let(preempted):
    with engine_of("dense", kv_tokens=400, kept_prefixes=0) as engine:
        endless = SamplingParams(max_new_tokens=380, ignore_eos=True)
        streams = [engine.generate([7 + index] * 15, endless) for index in range(6)]
        step_until(engine, lambda: len(engine._scheduler.queues.running) == 6)
        for stream in streams:
            stream.cancel()
        engine.step()
        assert [stream.result().finish_reason for stream in streams] == ["stopped"] * 6
        assert not preempted


def test_the_request_that_came_last_is_preempted_first_and_goes_on_before_those_that_wait(preempted):
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0, max_batch=2) as engine:
        streams = [engine.generate(prompt(100, seed).tolist(), LONG) for seed in range(3)]
        step_until(engine, lambda: preempted)
        scheduler = engine._scheduler
        assert [request.stream for request in scheduler.queues.running] == streams[:1]
        assert {request.stream for request in scheduler.queues.waiting} == set(streams[1:])
        streams[2].result()
        assert all(stream.is_done for stream in streams[:2])


def test_a_request_that_enters_gets_some_tokens_before_its_equals_preempt_it(monkeypatch):
    counts: dict[int, list[int]] = {}
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        scheduler, preempt = engine._scheduler, engine._scheduler.admission.preempt

        def counting(request):
            counts.setdefault(id(request.stream), []).append(len(request.stream._pieces))
            return preempt(request)

        monkeypatch.setattr(scheduler.admission, "preempt", counting)
        streams = [engine.generate([5 + index] * (9 + index), replace(LONG, max_new_tokens=70)) for index in range(9)]
        for stream in streams:
            stream.result()
    assert any(len(each) > 1 for each in counts.values())
    for each in counts.values():
        assert all(later - earlier >= AHEAD for earlier, later in pairwise(each))


def test_an_urgent_request_preempts_less_urgent_ones_and_only_where_that_is_enough(preempted):
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        short = replace(LONG, max_new_tokens=20)
        patient = engine.generate(PROMPTS[2], replace(LONG, max_new_tokens=70))
        step_until(engine, lambda: patient._pieces)
        important = engine.generate(PROMPTS[4], short, priority=-2)
        step_until(engine, lambda: important._pieces)
        urgent = engine.generate(prompt(220, 3).tolist(), short, priority=-1)
        for _ in range(3):
            engine.step()
        # It does not fit beside the important one, also if all others go.
        assert not preempted
        step_until(engine, lambda: urgent._pieces)
        assert (important.is_done, patient.is_done, len(preempted)) == (True, False, 1)
        assert [request.stream for request in swapped_requests(engine)] == [patient]
        assert urgent.result().tokens == alone(engine, prompt(220, 3).tolist(), 20)
        assert patient.result().tokens == alone(engine, PROMPTS[2], 70)


def test_a_prompt_that_passes_begins_again_where_a_more_urgent_request_needs_its_blocks(preempted):
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0, part=16, longest_gap_s=1e-6) as engine:
        urgent = engine.generate(PROMPTS[4], replace(LONG, max_new_tokens=70), priority=-1)
        step_until(engine, lambda: urgent._pieces)
        tokens = prompt(216, 3).tolist()
        patient = engine.generate(tokens, replace(LONG, max_new_tokens=20))
        step_until(engine, lambda: engine._scheduler.queues.prefilling)
        step_until(engine, lambda: engine._scheduler.queues.prefilling == [])
        assert [request.stream for request in engine._scheduler.queues.waiting] == [patient]
        assert not patient._pieces
        assert urgent.result().tokens == alone(engine, PROMPTS[4], 70)
        assert patient.result().tokens == alone(engine, tokens, 20)
        assert not preempted


def test_a_request_that_never_fits_is_refused_at_once():
    with engine_of("dense", kv_tokens=ROOM) as engine:
        other = engine.generate(PROMPTS[0], LONG)
        step_until(engine, lambda: other._pieces)
        never = engine.generate(PROMPTS[2], SamplingParams(max_new_tokens=200))
        engine.step()
        with pytest.raises(HeteroKVError, match=r"the request needs 329 tokens, and the store has 248, .* 11 blocks"):
            never.result()
        assert other.result().tokens == alone(engine, PROMPTS[0], LONG.max_new_tokens)


def test_without_layers_that_can_be_saved_each_longest_answer_has_its_blocks(monkeypatch, preempted):
    monkeypatch.setattr(RetrievalLayer, "saved", FamilyLayer.saved)
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        streams = [engine.generate(tokens, LONG) for tokens in LOAD]
        while engine.step():
            rows = [*engine._scheduler.queues.running, *engine._scheduler.queues.prefilling]
            assert sum(-(-row.max_stored_tokens // 8) * 8 for row in rows) <= ROOM
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in LOAD]
        assert not preempted


# -- memory


def test_blocks_that_a_cache_outside_of_the_engine_has_are_named():
    with engine_of("dense", kv_tokens=160) as engine:
        model = engine._scheduler.forward.model
        other = HeteroCache(model, store=engine._store)
        with torch.no_grad():
            model(torch.tensor([PROMPTS[1]]), past_key_values=other)
        with pytest.raises(HeteroKVError, match="no other one has them; reset other caches"):
            engine.generate(PROMPTS[2], SamplingParams(max_new_tokens=2)).result()
        other.reset()
        assert engine.generate(PROMPTS[2], SamplingParams(max_new_tokens=2)).result().tokens
