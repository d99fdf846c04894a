"""Requests for what a token attended to: beside answers, cancelled, on threads, and refused by name."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hetero_kv import Engine
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.operators import BoundedAttention, RetrievalAttention
from hetero_kv.rules.injecting import inject
from hetero_kv.rules.rule_file import parse_rules
from tests.serving.number_tokenizer import Numbers
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, answered, engine_of
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = PROMPTS[3]


def test_a_second_question_finds_what_the_first_one_had_to_compute():
    with engine_of("quest") as engine:
        tokens = [*PROMPT, *alone(engine, PROMPT)]
        first, second = (engine.attended(tokens, len(PROMPT) + place).result() for place in (8, 3))
        assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPT) + 2)


def test_an_answer_that_goes_on_can_be_asked_about():
    with engine_of("quest", kept_prefixes=0) as engine:
        stream = engine.generate(PROMPT, GREEDY)
        while len(stream._pieces) < 6:
            engine.step()
        tokens = [*PROMPT, *(piece.token for piece in stream._pieces)]
        attended = engine.attended(tokens, len(PROMPT) + 4).result()
        assert attended.cached_tokens == len(PROMPT) + 3
        assert stream.result().tokens == alone(engine, PROMPT)


def test_nothing_is_left_behind_and_no_answer_changes():
    with engine_of("adaptive", kept_prefixes=1, part=40) as engine:
        tokens = answered(engine, PROMPT)
        (allocator,) = engine._store.allocators.values()
        free = allocator.free_blocks
        quiet = engine.attended(tokens, len(PROMPT) + 5).result()
        assert allocator.free_blocks == free
        streams = [engine.generate(each, GREEDY) for each in PROMPTS[:3]]
        questions = []
        while not all(stream.is_done for stream in streams):
            questions.append(engine.attended(tokens, len(PROMPT) + 5, prompt_tokens=len(PROMPT)))
            engine.step()
        assert [stream.result().tokens for stream in streams] == [alone(engine, each) for each in PROMPTS[:3]]
        for question in questions:
            np.testing.assert_allclose(question.result().masses, quiet.masses, atol=1e-5)
        while engine._prefixes.drop_oldest():
            pass
        assert allocator.free_blocks == allocator.num_blocks


def test_one_that_is_cancelled_or_fails_leaves_alone(monkeypatch):
    with engine_of("dense", kept_prefixes=0, part=40) as engine:
        tokens = answered(engine, PROMPT)
        answer = engine.generate(PROMPTS[1], GREEDY)
        cancelled = engine.attended(tokens, len(PROMPT) + 5)
        for _ in range(3):
            engine.step()
        cancelled.cancel()
        with pytest.raises(HeteroKVError, match="what token 205 attended to was cancelled"):
            cancelled.result()
        monkeypatch.setattr(RetrievalAttention, "_record_token", lambda *_: None)
        with pytest.raises(HeteroKVError, match=r"layers \[0, 1, 2\] have not recorded their attention"):
            engine.attended(tokens, len(PROMPT) + 5).result()
        assert answer.result().tokens == alone(engine, PROMPTS[1])
        (allocator,) = engine._store.allocators.values()
        assert allocator.free_blocks == allocator.num_blocks


def test_a_record_without_a_key_that_matters_is_refused(monkeypatch):
    from hetero_kv.engine.attention_record import AttentionRecord

    add_keys = AttentionRecord.add_keys

    def fewer(self, q, keys, positions, scale, softcap, attended=None):
        add_keys(self, q, keys[:, :-40], positions[:-40], scale, softcap, attended[:, :-40])

    with engine_of("dense") as engine:
        tokens = answered(engine, PROMPT)
        monkeypatch.setattr(AttentionRecord, "add_keys", fewer)
        with pytest.raises(HeteroKVError, match="log-sum-exp of the recorded keys differs from that of the attention"):
            engine.attended(tokens, len(PROMPT) + 5).result()


def test_layers_that_cannot_say_are_refused_by_name(monkeypatch):
    with engine_of("streaming_llm") as engine:
        tokens = answered(engine, PROMPT)
        with pytest.raises(
            HeteroKVError, match=r"layers\.0\.self_attn \(BoundedAttention\) does not attend to all of a"
        ):
            engine.attended(tokens, len(PROMPT), prompt_tokens=len(PROMPT))
        monkeypatch.setattr(BoundedAttention, "records_attention", False)
        with pytest.raises(HeteroKVError, match=r"layers\.0\.self_attn \(BoundedAttention\) cannot say which tokens"):
            engine.attended(tokens, len(PROMPT) + 1)
    own = [{"match": {"name": r"layers\.1\.self_attn$"}, "replace": {"class": "default"}}]
    model = tiny_model("llama")
    inject(model, parse_rules({"extends": "dense.yaml", "long_context": {"max_seq_len": 400}, "rules": own}))
    with (
        Engine(LoadedModel(model, Numbers(), "tiny", 512), max_seq_len=400, starts_thread=False) as engine,
        pytest.raises(HeteroKVError, match="layer 1 of the model has attention of its own"),
    ):
        engine.attended(tokens, len(PROMPT))


def test_arguments_outside_their_range_are_refused_by_name():
    with engine_of("dense") as engine:
        for position, settings, message in (
            (0, {}, "position is 0; it must be from 1 to 8"),
            (9, {}, "position is 9; it must be from 1 to 8"),
            (3, {"prompt_tokens": 4}, "prompt_tokens is 4; it must be from 1 to position, 3"),
            (3, {"prompt_tokens": 0}, "prompt_tokens is 0"),
            (3, {"bins": 0}, "bins is 0; it must be at least 1"),
            (3, {"bins": [0, 2, 2]}, r"bins is \[0, 2, 2\]; the bins' first tokens rise from 0 and are below 3"),
            (3, {"bins": [1]}, "first tokens rise from 0"),
            (3, {"bins": [0, 3]}, "are below 3"),
            (3, {"bins": "all"}, "bins is 'all'; give a number, or the first token of each bin"),
        ):
            with pytest.raises(HeteroKVError, match=message):
                engine.attended([5] * 9, position, **settings)
        with pytest.raises(CacheFullError, match="the prompt has 401 tokens"):
            engine.attended([5] * 402, 401)
    with pytest.raises(HeteroKVError, match="the engine is closed"):
        engine.attended([5] * 9, 3)


def test_a_thread_answers_threads_and_event_loops():
    with engine_of("quest", starts_thread=True) as engine:
        tokens = answered(engine, PROMPT)

        async def ask(place):
            return await engine.attended(tokens, len(PROMPT) + place)

        async def ask_all():
            return await asyncio.gather(*map(ask, range(1, 4)))

        found = asyncio.run(ask_all())
        assert [each.position for each in found] == [len(PROMPT) + place for place in range(1, 4)]
        assert (engine.attended(tokens, len(PROMPT) + 2).result(60).masses == found[1].masses).all()
