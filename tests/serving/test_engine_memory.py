"""The engine's memory: what requests share, wait for and give back."""

from __future__ import annotations

import pytest

from hetero_kv import SamplingParams
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of
from tests.support.ragged_rows import prompt

pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_blocks_are_free_when_all_requests_have_ended():
    with engine_of(kept_prefixes=0, part=40) as engine:
        streams = [engine.generate(tokens, GREEDY) for tokens in PROMPTS]
        for _ in range(9):
            engine.step()
        streams[1].cancel()
        for stream in streams:
            stream.result()
        (allocator,) = engine._store.allocators.values()
        assert allocator.free_blocks == allocator.num_blocks


def test_many_requests_about_one_document_take_its_memory_once():
    document = prompt(300, 9).tolist()
    with engine_of("dense", kv_tokens=800) as engine:
        engine.generate(document, SamplingParams(max_new_tokens=1)).result()
        streams = [engine.generate([*document, token], GREEDY) for token in range(2, 10)]
        while not all(stream._pieces for stream in streams):
            assert engine.step()
        assert len(engine._scheduler.queues.running) == len(streams)
        (allocator,) = engine._store.allocators.values()
        endings = len(streams) * 3
        assert allocator.num_blocks - allocator.free_blocks <= -(-len(document) // allocator.block_size) + endings


def test_as_many_requests_of_full_length_as_the_batch_has_rows_are_answered_at_a_time():
    with engine_of("dense", max_batch=3, max_seq_len=99) as engine:
        endless = SamplingParams(max_new_tokens=90, ignore_eos=True)
        engine.generate(PROMPTS[1], GREEDY).result()
        streams = [engine.generate(tokens, endless) for tokens in (PROMPTS[1], PROMPTS[6], PROMPTS[7])]
        for _ in range(6):
            engine.step()
        assert len(engine._scheduler.queues.running) == 3
        assert [len(stream.result().tokens) for stream in streams] == [39, 10, 67]


def test_a_request_waits_until_another_one_has_freed_its_memory():
    with engine_of("dense", kv_tokens=424, kept_prefixes=4) as engine:
        streams = [engine.generate(tokens, GREEDY) for tokens in (PROMPTS[3], PROMPTS[2], PROMPTS[1])]
        engine.step()
        engine.step()
        assert len(engine._scheduler.queues.waiting) >= 1
        assert [stream.result().tokens for stream in streams] == [
            alone(engine, tokens) for tokens in (PROMPTS[3], PROMPTS[2], PROMPTS[1])
        ]


def test_a_request_that_must_wait_anyway_drops_no_sequence_that_is_kept():
    with engine_of("dense", kv_tokens=424, kept_prefixes=4) as engine:
        engine.generate(PROMPTS[2], GREEDY).result()
        running = engine.generate(PROMPTS[3], GREEDY)
        engine.step()
        waiting = engine.generate([*reversed(PROMPTS[3])], GREEDY)
        engine.step()
        assert len(engine._scheduler.queues.waiting) == 1
        assert len(engine._prefixes.caches) == 1
        # It may drop it once that helps.
        assert waiting.result().tokens == alone(engine, [*reversed(PROMPTS[3])])
        assert running.is_done
        assert engine._prefixes.find([*PROMPTS[2], 5]).reuse.tokens == 0


def test_a_request_that_never_fits_is_refused_by_name():
    with engine_of("dense") as engine:
        with pytest.raises(CacheFullError, match="the prompt has 401 tokens, and max_seq_len is 400"):
            engine.generate([5] * 401)
        full = engine.generate([5] * 395, SamplingParams(max_new_tokens=50, ignore_eos=True)).result()
        assert (full.finish_reason, len(full.tokens)) == ("full", 6)
        for tokens, message in (([], "the prompt is empty"), ([97], "the prompt has token 97; the model has tokens")):
            with pytest.raises(HeteroKVError, match=message):
                engine.generate(tokens)
        with pytest.raises(HeteroKVError, match="logit_bias names token 97"):
            engine.generate([5], SamplingParams(logit_bias={97: 1.0}))
