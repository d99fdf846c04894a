"""What an engine says of itself and of its requests while it computes."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from hetero_kv import SamplingParams
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.request import Request
from hetero_kv.serving.status import EngineStatus, RequestStatus, together
from hetero_kv.serving.swapped import Swapped
from hetero_kv.store.allocator import BlockAllocator
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


def test_kept_sequences_are_never_seen_as_none():
    class Known:
        """A kept sequence that reads, when its cache is read, as another thread might at that moment."""

        @property
        def cache(self):
            seen.append(prefixes.kept)
            return self

    prefixes, seen = ResidentPrefixes([], 4), []
    prefixes._kept = kept = [Known(), Known(), Known()]
    prefixes._use(kept[0])
    assert set(seen) == {3}
    assert prefixes._kept == [kept[1], kept[2], kept[0]]


def test_a_request_that_comes_back_from_the_disk_is_read_meanwhile():
    class ComingBack(Request):
        """What it has on the disk is gone the second time that somebody looks."""

        places = iter([Swapped(Path(), 7, (), None), None])
        cache = None

        @property
        def swapped(self):
            return next(self.places)

    assert object.__new__(ComingBack).stored == 7


def test_mean_keys_are_counted_while_another_layer_gets_its_own():
    class Growing:
        @property
        def nbytes(self):
            few.means[1] = self
            return 8

    few = DraftBlocks()
    few.means[0] = Growing()
    assert few.dram_bytes == 8


def test_reading_the_status_changes_no_reference_count(monkeypatch):
    """Other threads read it while the engine's own allocates blocks."""
    with engine_of() as engine:
        stream = engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=4, ignore_eos=True))
        engine.step()
        abandoned = engine._queues.running[0].cache.fork()
        del abandoned
        (allocator,) = engine._store.allocators.values()
        monkeypatch.setattr(BlockAllocator, "_reclaim", lambda allocator: pytest.fail("another thread counts"))
        assert 0 < engine.status().free < engine.status().capacity
        monkeypatch.undo()
        assert allocator._abandoned
        stream.result()
