"""A long prompt's forward pauses while others get their tokens, and neither changes the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hetero_kv import HeteroCache, SamplingParams, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from hetero_kv.adapter.kernel_mixer import KernelMixer
from hetero_kv.families.retrieval.attention import RetrievalAttention
from hetero_kv.serving.forward import ModelForward, Part
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of, forwards_within, pause_everywhere
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few
from tests.support.small_recipes import RECIPES
from tests.support.tiny_models import tiny_model

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


def test_attention_beside_a_state_pauses_and_both_keep_their_kernels(monkeypatch):
    monkeypatch.setattr("hetero_kv.families.retrieval.exact_prefill._SCORES_BETWEEN_PAUSES", 1)
    model = tiny_model("falcon_h1")
    inject(model, "dense", command_line={"block_size": 16, "max_seq_len": 700, "chunk_size": 256})
    forward, tokens = ModelForward(model), prompt(600, 3).tolist()
    assert forward.pauses
    other, others_alone, whole, cut = (HeteroCache(model) for _ in range(4))
    for cache in (other, others_alone):
        forward.prefill(cache, Part(tokens, 0, 40, 40, None))
    with whole.requesting(pause=lambda: None):
        expected = forward.prefill(whole, Part(tokens, 0, 600, 0, None))
    layers, pauses = [each for each in model.modules() if isinstance(each, ChunkedDecoderLayer)], []
    kernels = [layer._kernels for layer in layers]
    assert {type(each) for each in kernels} == {KernelMixer}
    with cut.requesting(pause=lambda: pauses.append(forward.decode([other], [7]))):
        assert torch.equal(forward.prefill(cut, Part(tokens, 0, 600, 0, None)), expected)
    # Three chunks of 256, 256 and 88 queries, 64 at a time.
    assert len(pauses) == len(layers) * (3 + 3 + 1)
    assert [layer._kernels for layer in layers] == kernels
    for logits in pauses:
        assert torch.equal(logits, forward.decode([others_alone], [7]))
    for token in (5, 9):
        assert torch.equal(forward.decode([cut], [token]), forward.decode([whole], [token]))


@pytest.mark.parametrize("recipe", ["dense", "adaptive"])
def test_fused_layers_in_bfloat16_pause_within_a_chunk(recipe, monkeypatch):
    monkeypatch.setattr("hetero_kv.families.retrieval.exact_prefill._SCORES_BETWEEN_PAUSES", 1)
    model = tiny_model("qwen2").to(torch.bfloat16)
    settings = {"block_size": 16, "max_seq_len": 700, "weights": "q8_0"}
    inject(model, recipe, command_line=settings)
    forward, tokens = ModelForward(model), prompt(600, 3).tolist()
    other, caches, pauses = HeteroCache(model), [HeteroCache(model), HeteroCache(model)], []
    forward.prefill(other, Part(tokens, 0, 40, 40, None))

    def pause():
        pauses.append(forward.decode([other], [7]))

    parts = Part(tokens, 0, 300, 0, None), Part(tokens, 300, 600, 0, None)
    expected = [forward.prefill(caches[0], part) for part in parts]
    with caches[1].requesting(pause=pause):
        logits = [forward.prefill(caches[1], part) for part in parts]
    for mine, theirs in zip(logits, expected, strict=True):
        assert torch.linalg.vector_norm(mine - theirs) < 3e-2 * torch.linalg.vector_norm(theirs)
    layers = [each for each in model.modules() if isinstance(getattr(each, "_short", None), FusedPrefillLayer)]
    # Behind the inputs, between five parts of the attention's queries, behind them, and twice in the second half.
    assert len(layers) == len(caches[0].layers)
    assert len(pauses) == 2 * len(layers) * (2 + 4 + 2)
    alone_cache = HeteroCache(model)
    forward.prefill(alone_cache, Part(tokens, 0, 40, 40, None))
    assert torch.equal(pauses[0], forward.decode([alone_cache], [7]))


def test_a_prompt_pauses_while_its_blocks_get_their_representatives(monkeypatch):
    monkeypatch.setattr("hetero_kv.families.retrieval.prefill._KEYS_AT_ONCE", 3 * 2 * 16 * 16)
    model = tiny_model("qwen2")
    inject(model, "adaptive", command_line={"block_size": 16, "max_seq_len": 700})
    forward, tokens = ModelForward(model), prompt(400, 3).tolist()
    other, whole, cut = (HeteroCache(model) for _ in range(3))
    forward.prefill(other, Part(tokens, 0, 40, 40, None))
    expected, pauses = forward.prefill(whole, Part(tokens, 0, 400, 0, None)), []
    represented, places = RetrievalAttention._represent, []

    def representing(*arguments):
        before = len(pauses)
        represented(*arguments)
        places.append(len(pauses) - before)

    monkeypatch.setattr(RetrievalAttention, "_represent", representing)
    with cut.requesting(pause=lambda: pauses.append(forward.decode([other], [7]))):
        assert torch.equal(forward.prefill(cut, Part(tokens, 0, 400, 0, None)), expected)
    assert len(places) == len(cut.layers)
    assert min(places) >= 2
    for token in (5, 9):
        assert torch.equal(forward.decode([cut], [token]), forward.decode([whole], [token]))


def test_a_decoded_token_does_not_pause_while_many_blocks_get_their_representatives(monkeypatch):
    """Its kernels, and their buffers, wait for the end of its forward."""
    monkeypatch.setattr("hetero_kv.families.retrieval.prefill._KEYS_AT_ONCE", 1)
    monkeypatch.setattr("hetero_kv.families.retrieval.entering_blocks._AT_ONCE", 0)
    model = tiny_model("qwen2")
    inject(model, "adaptive", command_line={"block_size": 16, "max_seq_len": 700})
    forward, cache, tokens = ModelForward(model), HeteroCache(model), prompt(400, 3).tolist()
    represented, blocks, pauses = RetrievalAttention._represent, [], []

    def representing(operator, layer, step, start, end):
        blocks.append(end - start)
        represented(operator, layer, step, start, end)

    # A prompt that is cancelled before its last part, behind which a token is replayed.
    forward.prefill(cache, Part(tokens, 0, 300, 0, None))
    monkeypatch.setattr(RetrievalAttention, "_represent", representing)
    with cache.requesting(pause=lambda: pauses.append(1)):
        forward.decode([cache], [7])
    assert max(blocks) > 2
    assert not pauses
