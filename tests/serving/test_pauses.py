"""A long prompt's forward pauses while others get their tokens, and neither changes the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetero_kv import SamplingParams
from hetero_kv.serving.forward import ModelForward
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of, forwards_within, pause_everywhere
from tests.support.slow_variants import with_few
from tests.support.small_recipes import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread")

ANSWER = SamplingParams(max_new_tokens=40, ignore_eos=True)
LONG = PROMPTS[3]


def running(engine, prompts):
    """Requests whose prompts are computed."""
    streams = [engine.generate(tokens, ANSWER) for tokens in prompts]
    while len(engine._queues.running) < len(streams):
        engine.step()
    return streams


@pytest.mark.parametrize("recipe", with_few(RECIPES, ("dense", "adaptive", "streaming_llm", "minference")))
def test_a_prompt_that_pauses_for_others_changes_no_answer(recipe, monkeypatch):
    with engine_of(recipe) as engine:
        pause_everywhere(engine)
        streams = running(engine, PROMPTS[:2])
        within = forwards_within(engine, monkeypatch)
        long = engine.generate(LONG, GREEDY)
        assert long.result().tokens == alone(engine, LONG)
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in PROMPTS[:2]]
    # At least once per layer; these layers' attention computes few queries at once.
    assert within.count("decode") >= 3


@pytest.mark.parametrize(
    "architecture", with_few(["qwen2", "gemma2", "qwen3_moe", "lfm2", "falcon_h1"], ("lfm2", "falcon_h1"))
)
def test_other_architectures_pause_too(architecture, monkeypatch):
    with engine_of("quest", architecture) as engine:
        pause_everywhere(engine)
        (stream,) = running(engine, PROMPTS[:1])
        within = forwards_within(engine, monkeypatch)
        assert engine.generate(LONG, GREEDY).result().tokens == alone(engine, LONG)
        assert stream.result().tokens == alone(engine, PROMPTS[0], 40)
    assert "decode" in within


def test_a_prompt_that_nobody_waits_for_does_not_pause(monkeypatch):
    with engine_of("dense") as engine:
        pause_everywhere(engine)
        within = forwards_within(engine, monkeypatch)
        assert engine.generate(LONG, GREEDY).result().tokens == alone(engine, LONG)
    assert not within


def test_chunks_are_short_while_others_wait_and_whole_again_after(monkeypatch):
    with engine_of("dense") as engine:
        pause_everywhere(engine)
        (stream,) = running(engine, PROMPTS[:1])
        forward, chunks = engine._scheduler.forward, []
        prefill = forward.prefill

        def noting(cache, part):
            report = cache.on_progress

            def reporting(layers_done, layers, done, total):
                chunks.append(done)
                report(layers_done, layers, done, total)

            cache.on_progress = reporting
            logits = prefill(cache, part)
            chunks.append(cache.chunk_tokens)
            return logits

        monkeypatch.setattr(forward, "prefill", noting)
        engine.generate(LONG, GREEDY).result()
        stream.cancel()
        assert {64, 128, 192} <= set(chunks)
        (cache,) = [each.cache for each in engine._queues.running] or [engine._prefixes.caches[-1]]
        assert cache.chunk_tokens is None


@pytest.mark.parametrize("is_due", [False, True])
def test_between_parts_others_get_tokens_only_if_they_are_due(is_due, monkeypatch):
    with engine_of("dense", longest_gap_s=1e-9 if is_due else 1e6) as engine:
        (stream,) = running(engine, PROMPTS[:1])
        scheduler = engine._scheduler
        # The prompt passes in parts of 64 tokens.
        monkeypatch.setattr(scheduler._part_size, "of", lambda remaining, *_: min(remaining, 64))
        monkeypatch.setattr(scheduler._part_size, "alone", 64)
        monkeypatch.setattr(ModelForward, "mixes", False)
        within, answered = forwards_within(engine, monkeypatch), []
        decode = scheduler._decoder.decode
        monkeypatch.setattr(scheduler._decoder, "decode", lambda rows: (answered.append(len(rows)), decode(rows)))
        long = engine.generate(LONG, GREEDY)
        before, pieces = len(stream._pieces), []
        while not long._pieces:
            engine.step()
            pieces.append(len(stream._pieces) - before)
        assert len(pieces) >= 3
        if is_due:
            assert len(set(pieces)) == len(pieces)
            assert len(answered) > len(pieces)
        else:
            # They are answered again behind the last part.
            assert not within
            assert pieces == [0] * (len(pieces) - 1) + [1]
            assert len(answered) == 1
        assert long.result().tokens == alone(engine, LONG)
        assert stream.result().tokens == alone(engine, PROMPTS[0], 40)


def test_a_pause_without_a_step_looks_at_no_hooks(monkeypatch):
    with engine_of("dense") as engine:
        (stream,) = running(engine, PROMPTS[:1])
        scheduler, looks, pauses = engine._scheduler, [], []
        receive, is_hooked = scheduler.receive, ModelForward.is_hooked.fget
        monkeypatch.setattr(ModelForward, "is_hooked", property(lambda self: (looks.append(1), is_hooked(self))[1]))
        monkeypatch.setattr(scheduler, "receive", lambda: (pauses.append(engine._queues.computing), receive()))
        engine.generate(LONG, GREEDY).result()
        assert len([each for each in pauses if each is not None]) > 10
        assert len(looks) < 10
        stream.cancel()


def test_a_short_prompt_comes_first_while_a_long_one_pauses(monkeypatch):
    with engine_of("dense") as engine:
        forward, arrived = engine._scheduler.forward, []
        prefill = forward.prefill

        def arriving(cache, part):
            report = cache.on_progress

            def reporting(*args):
                if not arrived and args[0] == 1:
                    arrived.append(engine.generate(PROMPTS[0], GREEDY))
                    engine._loop._receive()
                report(*args)
                if arrived and args[0] == 2:
                    arrived.append(len(arrived[0]._pieces))

            cache.on_progress = reporting
            return prefill(cache, part)

        within = forwards_within(engine, monkeypatch)
        monkeypatch.setattr(forward, "prefill", arriving)
        # Its prompt alone would take longer.
        engine._scheduler._order._speed = SimpleNamespace(tokens_per_s=1e-3)
        assert engine.generate(LONG, GREEDY).result().tokens == alone(engine, LONG)
        assert arrived[1] > 0
        assert arrived[0].result().tokens == alone(engine, PROMPTS[0])
    assert within[0] == "mixed"


def test_a_long_prompt_is_cancelled_while_others_go_on():
    with engine_of("quest") as engine:
        pause_everywhere(engine)
        streams = running(engine, PROMPTS[:2])
        long = engine.generate(LONG, ANSWER)
        pieces = len(streams[0]._pieces)
        take = engine._scheduler._decoder.decode

        def cancelling(rows):
            take(rows)
            if engine._queues.computing is not None and len(streams[0]._pieces) > pieces + 3:
                long.cancel()

        engine._scheduler._decoder.decode = cancelling
        assert long.result().finish_reason == "stopped"
        assert not long.result().tokens
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in PROMPTS[:2]]
        assert not engine._queues.all


def test_a_cancelled_request_ends_in_a_pause_and_takes_no_memory_before():
    with engine_of("quest", kv_tokens=330, kept_prefixes=0) as engine:
        (beside,) = running(engine, PROMPTS[:1])
        admission, cancelled, ended, preempted = engine._scheduler.admission, [], [], []
        admit, preempt = admission.admit, admission.preempt
        admission.preempt = lambda request: preempted.append(request) or preempt(request)

        def arriving():
            admit()
            if engine._queues.computing is not None:
                ended.extend(stream.is_done for stream in cancelled)
                if not cancelled:
                    # More urgent than both others, and too large for the memory that they leave.
                    cancelled.append(engine.generate(PROMPTS[6], GREEDY, priority=-1))
                    cancelled[0].cancel()

        admission.admit = arriving
        assert engine.generate(LONG, GREEDY).result().tokens == alone(engine, LONG)
        assert beside.result().tokens == alone(engine, PROMPTS[0], 40)
        assert ended
        assert all(ended)
        assert not preempted


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_failure_in_a_pause_leaves_the_prompt_and_the_others_as_they_were(error):
    with engine_of("quest") as engine:
        pause_everywhere(engine)
        streams = running(engine, PROMPTS[:2])
        long = engine.generate(LONG, GREEDY)
        decode, failures = engine._scheduler._decoder.decode, []

        def failing(rows):
            if engine._queues.computing is not None and len(failures) < 3:
                failures.append(len(rows))
                raise error
            decode(rows)

        engine._scheduler._decoder.decode = failing
        for _ in range(3):
            with pytest.raises(error):
                engine._loop._step()
        assert engine._queues.computing is None
        assert long.result().tokens == alone(engine, LONG)
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in PROMPTS[:2]]
    assert failures == [2, 2, 2]


def test_a_row_that_fails_in_a_pause_fails_alone(monkeypatch):
    with engine_of("quest") as engine:
        pause_everywhere(engine)
        streams = running(engine, PROMPTS[:2])
        forward, unlucky = engine._scheduler.forward, engine._queues.running[0].cache
        decode = forward.decode

        def failing(caches, tokens):
            if engine._queues.computing is not None and unlucky in caches:
                raise MemoryError("no room")
            return decode(caches, tokens)

        monkeypatch.setattr(forward, "decode", failing)
        assert engine.generate(LONG, GREEDY).result().tokens == alone(engine, LONG)
        assert streams[1].result().tokens == alone(engine, PROMPTS[1], 40)
        with pytest.raises(MemoryError, match="no room"):
            streams[0].result()


def test_a_paused_prompt_is_not_preempted():
    """A more urgent request that needs its memory waits for the end of its part."""
    with engine_of("quest", kv_tokens=300, kept_prefixes=0) as engine:
        pause_everywhere(engine)
        (beside,) = running(engine, PROMPTS[:1])
        long = engine.generate(LONG, GREEDY, priority=5)
        preempted, urgent = [], []
        preempt, decode = engine._scheduler.admission.preempt, engine._scheduler._decoder.decode
        engine._scheduler.admission.preempt = lambda request: (
            preempted.append((request.tokens[:200] == LONG, engine._queues.computing)) or preempt(request)
        )

        def arriving(rows):
            if engine._queues.computing is not None and not urgent:
                urgent.append(engine.generate(PROMPTS[2], GREEDY))
            decode(rows)

        engine._scheduler._decoder.decode = arriving
        assert long.result().tokens == alone(engine, LONG)
        assert urgent[0].result().tokens == alone(engine, PROMPTS[2])
        assert beside.result().tokens == alone(engine, PROMPTS[0], 40)
    assert (True, None) in preempted
    assert all(computing is None for is_long, computing in preempted if is_long)
