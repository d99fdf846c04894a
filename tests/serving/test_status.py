"""What an engine says of itself and of its requests while it computes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hetero_kv import SamplingParams
from hetero_kv.serving.status import EngineStatus, RequestStatus, together
from tests.serving.tiny_engine import PROMPTS, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_requests_are_counted_by_what_they_wait_for():
    with engine_of(part=64, max_batch=2) as engine:
        streams = [engine.generate(tokens, SamplingParams(max_new_tokens=4, ignore_eos=True)) for tokens in PROMPTS[:3]]
        assert [each.state for each in engine.status().requests] == ["waiting"] * 3
        assert engine.status().free == engine.status().capacity
        assert streams[0].progress is None
        engine.step()
        engine.step()
        status = engine.status()
        assert [each.state for each in status.requests] == ["answering", "answering", "waiting"]
        assert [each.prompt_tokens for each in status.requests] == [5, 61, 130]
        assert [each.processed_tokens for each in status.requests] == [5, 61, 0]
        assert 0 < status.free < status.capacity
        assert status.dram_bytes > 0
        for stream in streams:
            stream.result()
        assert engine.status().requests == ()
        assert engine.status().kept_prefixes == 3
        assert engine.status().is_open
    assert not engine.status().is_open


def test_progress_grows_to_the_whole_prompt():
    with engine_of(part=40) as engine:
        stream = engine.generate(PROMPTS[3], SamplingParams(max_new_tokens=1))
        seen = []
        while not stream.is_done:
            engine.step()
            seen.append(stream.progress.processed_tokens)
        assert seen == [40, 80, 120, 160, 200]
        assert stream.progress.prompt_tokens == 200
        again = engine.generate(PROMPTS[3], SamplingParams(max_new_tokens=1))
        again.result()
        assert again.progress.cached_tokens == 199


def test_an_engine_with_requests_and_no_steps_is_stuck():
    with engine_of() as engine:
        assert not engine.status().is_stuck(0.0)
        engine.generate(PROMPTS[0])
        assert engine.status().is_stuck(0.0)
        assert not engine.status().is_stuck(60.0)


#: No field is as of an engine that is closed.
BUSY = EngineStatus(
    (RequestStatus("answering", 5, 5, 2),), kept_prefixes=1, capacity=640, free=64, dram_bytes=4096, idle_s=0.5,
    is_open=True, max_batch=8, prefill_tokens_per_s=100.0, decode_step_s=0.25, decode_row_s=0.125, bytes_per_token=2.0,
    context_failures=3,
)  # fmt: skip


def test_several_engines_are_one_in_every_field():
    assert together([BUSY]) == BUSY
    closed = EngineStatus((), 0, 0, 0, 0, 0.0, False, 0, None, None, 0.0, 0.0, 0)
    assert all(getattr(BUSY, each.name) != getattr(closed, each.name) for each in fields(EngineStatus))
    assert together([]) == closed
    busier = replace(
        BUSY, idle_s=0.25, prefill_tokens_per_s=None, decode_step_s=None, decode_row_s=0.5, bytes_per_token=4.0,
        is_open=False,
    )  # fmt: skip
    assert together([BUSY, busier]) == EngineStatus(
        BUSY.requests * 2, kept_prefixes=2, capacity=1280, free=128, dram_bytes=8192, idle_s=0.25, is_open=True,
        max_batch=16, prefill_tokens_per_s=100.0, decode_step_s=0.25, decode_row_s=0.125, bytes_per_token=4.0,
        context_failures=6,
    )  # fmt: skip
