"""The engine: each of many requests gets the tokens that it gets alone."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace

import pytest
import torch

from hetero_kv import Engine, HeteroCache, SamplingParams
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.serving.queues import Queues
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "recipe",
    with_few(
        ["dense", "quest", "adaptive", "retroinfer", "shadowkv", "snapkv", "infinipot"],
        ("quest", "infinipot"),
    ),
)
def test_each_of_many_requests_gets_the_tokens_that_it_gets_alone(recipe):
    with engine_of(recipe, max_batch=3) as engine:
        streams = [engine.generate(tokens, GREEDY) for tokens in PROMPTS]
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, tokens) for tokens in PROMPTS]


def test_requests_that_come_and_go_at_any_time_change_no_answer():
    drawn = random.Random(1)
    with engine_of(max_batch=4, part=40, kept_prefixes=3) as engine:
        streams = []
        for tokens in [*PROMPTS, *PROMPTS]:
            streams.append((tokens, engine.generate(tokens, GREEDY)))
            for _ in range(drawn.randrange(6)):
                engine.step()
            if drawn.random() < 0.25:
                streams[drawn.randrange(len(streams))][1].cancel()
        for tokens, stream in streams:
            completion = stream.result()
            expected = alone(engine, tokens)
            assert completion.tokens == expected[: len(completion.tokens)]
            assert completion.finish_reason == "stopped" or completion.tokens == expected


def test_a_prompt_computes_only_what_no_earlier_one_began_with():
    with engine_of("quest") as engine:
        first = engine.generate(PROMPTS[2], GREEDY).result()
        following = [*PROMPTS[2], *first.tokens[:-1], *PROMPTS[0]]
        second = engine.generate(following, GREEDY).result()
        assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPTS[2]) + len(first.tokens) - 1)
        branch = [*PROMPTS[2][:100], *PROMPTS[1]]
        third = engine.generate(branch, GREEDY).result()
        assert third.cached_tokens == 100
        assert third.tokens == alone(engine, branch)


@pytest.mark.parametrize(
    "recipe",
    with_few(
        ["dense", "quest", "adaptive", "retroinfer", "shadowkv", "snapkv", "infllm_stream", "self_extend"],
        ("retroinfer", "snapkv"),
    ),
)
def test_behind_a_shared_beginning_a_prompt_is_answered_as_alone(recipe):
    prompt_only = SamplingParams(max_new_tokens=1)
    with engine_of(recipe) as engine:
        engine.generate(PROMPTS[2], prompt_only).result()
        following, branch = [*PROMPTS[2], *PROMPTS[1]], [*PROMPTS[2][:101], *PROMPTS[7]]
        found = [engine.generate(tokens, GREEDY).result() for tokens in (following, branch)]
        assert [each.tokens for each in found] == [alone(engine, tokens) for tokens in (following, branch)]


def test_a_beginning_that_other_weights_computed_is_not_shared():
    with engine_of("dense") as engine:
        engine.generate(PROMPTS[2], GREEDY).result()
        with torch.no_grad():
            engine._scheduler.forward.model.model.layers[0].mlp.down_proj.weight.mul_(2)
        again = engine.generate([*PROMPTS[2], 7], GREEDY).result()
        assert again.cached_tokens == 0
        assert again.tokens == alone(engine, [*PROMPTS[2], 7])


def test_a_mask_that_fails_fails_its_request_alone():
    class Broken:
        def apply(self, logits):
            raise ZeroDivisionError("a fault of a grammar")

        def accept(self, token):
            pass

    with engine_of("dense") as engine:
        good = engine.generate(PROMPTS[0], GREEDY)
        bad = engine.generate(PROMPTS[1], SamplingParams(mask=Broken()))
        with pytest.raises(ZeroDivisionError, match="a fault of a grammar"):
            bad.result()
        assert good.result().tokens == alone(engine, PROMPTS[0])


def test_a_store_of_other_rules_or_beside_a_length_is_refused():
    with engine_of("dense") as engine, engine_of("quest") as other:
        model, store = engine._scheduler.forward.model, engine._store
        assert HeteroCache(model, store=store).max_seq_len == 400
        for arguments in ({"store": other._store}, {"store": store, "max_seq_len": 8}, {"store": store, "forks": 1}):
            with pytest.raises(HeteroKVError, match="the store was made for other rules"):
                HeteroCache(model, **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_batch", 0), ("part", 0), ("kept_prefixes", -1), ("max_seq_len", 0), ("kv_tokens", 0), ("longest_gap_s", 0)],
)
def test_a_setting_of_the_engine_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(HeteroKVError, match=f"Engine: {name} is {value}"):
        engine_of("dense", **{name: value})


def test_a_prompt_shares_the_beginning_of_one_that_is_being_answered():
    with engine_of("dense") as engine:
        first = engine.generate(PROMPTS[3], GREEDY)
        while not first._pieces:
            engine.step()
        second = engine.generate([*PROMPTS[3], 7], GREEDY)
        assert second.result().cached_tokens == len(PROMPTS[3])
        assert first.result().tokens == alone(engine, PROMPTS[3])
        assert second.result().tokens == alone(engine, [*PROMPTS[3], 7])


def test_a_forward_that_fails_fails_the_request_that_it_computes_and_no_other(monkeypatch):
    with engine_of("quest") as engine:
        streams = [engine.generate(tokens, GREEDY) for tokens in PROMPTS[:4]]
        while not all(stream._pieces for stream in streams):
            engine.step()
        forward, bad = engine._scheduler.forward, engine._scheduler.queues.running[2]
        decode = forward.decode

        def failing(caches, tokens):
            if bad.cache in caches:
                raise RuntimeError("a fault")
            return decode(caches, tokens)

        monkeypatch.setattr(forward, "decode", failing)
        with pytest.raises(RuntimeError, match="a fault"):
            streams[2].result()
        for index in (0, 1, 3):
            assert streams[index].result().tokens == alone(engine, PROMPTS[index])


def test_a_row_without_numbers_fails_alone(monkeypatch):
    with engine_of("quest") as engine:
        streams = [engine.generate(tokens, GREEDY) for tokens in PROMPTS[:3]]
        while not all(stream._pieces for stream in streams):
            engine.step()
        forward = engine._scheduler.forward
        decode = forward.decode

        def broken(caches, tokens):
            logits = decode(caches, tokens)
            logits[1] = float("nan")
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(forward, "decode", broken)
            engine.step()
        with pytest.raises(HeteroKVError, match="largest logit is nan"):
            streams[1].result()
        assert streams[0].result().tokens == alone(engine, PROMPTS[0])
        assert streams[2].result().tokens == alone(engine, PROMPTS[2])


def test_a_seed_draws_the_same_tokens_whatever_is_in_the_batch():
    drawn = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.5, top_p=0.9, seed=3)
    with engine_of("quest", kept_prefixes=0) as engine:
        by_itself = engine.generate(PROMPTS[1], drawn).result().tokens
        others = [engine.generate(tokens, GREEDY) for tokens in PROMPTS[2:5]]
        assert engine.generate(PROMPTS[1], drawn).result().tokens == by_itself
        assert all(other.result().tokens for other in others)
        assert engine.generate(PROMPTS[1], replace(drawn, seed=4)).result().tokens != by_itself


def test_an_urgent_request_is_admitted_before_those_that_wait():
    with engine_of("dense", max_batch=1) as engine:
        streams = [engine.generate(tokens, GREEDY) for tokens in PROMPTS[:3]]
        engine.step()
        urgent = engine.generate(PROMPTS[4], GREEDY, priority=-1)
        urgent.result()
        assert [stream.is_done for stream in streams] == [True, False, False]


def test_a_thread_answers_threads_and_event_loops():
    with engine_of("quest", starts_thread=True) as engine:
        blocking = engine.generate(PROMPTS[0], GREEDY)

        async def ask(tokens):
            stream = engine.generate(tokens, GREEDY)
            pieces = [piece.token async for piece in stream]
            return tuple(pieces), (await stream).tokens

        async def ask_all():
            return await asyncio.gather(*(ask(tokens) for tokens in PROMPTS[1:4]))

        answers = asyncio.run(ask_all())
        assert all(pieces == whole for pieces, whole in answers)
        assert [piece.token for piece in blocking] == list(blocking.result().tokens)
        assert [blocking.result().tokens, *(whole for _, whole in answers)] == [
            alone(engine, tokens) for tokens in PROMPTS[:4]
        ]
        unread = engine.generate(PROMPTS[3], SamplingParams(max_new_tokens=150, ignore_eos=True))
    assert unread.result().finish_reason == "stopped"
    with pytest.raises(HeteroKVError, match="the engine is closed"):
        engine.generate(PROMPTS[0])


def test_an_engine_that_nobody_closes_ends_before_the_interpreter(monkeypatch):
    at_exit = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    engine = engine_of("quest", starts_thread=True)
    stream = engine.generate(PROMPTS[3], SamplingParams(max_new_tokens=150, ignore_eos=True))
    (close,) = at_exit
    close()
    assert not engine._loop._thread.is_alive()
    assert stream.result().finish_reason == "stopped"


def test_a_prompt_is_cancelled_between_two_chunks():
    with engine_of("dense", part=400) as engine:
        seen = []
        stream = engine.generate([*prompt(390, 3).tolist()], GREEDY)
        forward = engine._scheduler.forward
        prefill = forward.prefill

        def cancelling(cache, *arguments):
            check = cache.on_progress

            def report(*progress):
                seen.append(progress)
                stream.cancel()
                check(*progress)

            cache.on_progress = report
            return prefill(cache, *arguments)

        forward.prefill = cancelling
        completion = stream.result()
        assert (completion.finish_reason, completion.tokens, len(seen)) == ("stopped", (), 1)
        (allocator,) = engine._store.allocators.values()
        assert allocator.free_blocks == allocator.num_blocks


def test_a_prompt_that_comes_while_the_engine_closes_is_cancelled(monkeypatch):
    engine = engine_of("minference", starts_thread=True)
    loop, forward = engine._loop, engine._scheduler.forward
    receives, looked = threading.Event(), threading.Event()
    receive, prefill, everything = loop._receive, forward.prefill, Queues.all.fget

    def late_receive():
        receives.set()
        looked.wait(10)
        receive()

    def slow_prefill(cache, part):
        report = cache.on_progress

        def slow_report(*done):
            for _ in range(100):
                if not stream.is_cancelled:
                    threading.Event().wait(0.01)
            report(*done)

        cache.on_progress = slow_report
        return prefill(cache, part)

    def noticing(queues):
        found = everything(queues)
        if threading.current_thread() is not loop._thread:
            looked.set()
        return found

    monkeypatch.setattr(loop, "_receive", late_receive)
    monkeypatch.setattr(forward, "prefill", slow_prefill)
    monkeypatch.setattr(Queues, "all", property(noticing))
    stream = engine.generate(PROMPTS[3], GREEDY)
    assert receives.wait(10)
    engine.close()
    assert stream.result().finish_reason == "stopped"
    assert not stream.result().tokens


def test_a_model_without_rules_is_refused():
    with pytest.raises(HeteroKVError, match="has no rules injected"):
        Engine(LoadedModel(tiny_model("llama"), None, "tiny", 512))
