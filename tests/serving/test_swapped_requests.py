"""Requests that wait on the disk: where it is full, files that go, are damaged or interrupted."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hetero_kv.contexts import writing
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import HeteroKVError
from tests.serving.short_memory import LOAD, LONG, ROOM, require_all_free, step_until, swapped_requests
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread", "short_reserve")


@contextmanager
def a_full_disk(monkeypatch):
    """Files are written half."""

    def full(path, *_, **__):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_tensors", full)
        yield


def test_where_the_disk_is_full_others_wait_until_one_ends(monkeypatch, caplog):
    load = [(PROMPTS[2], 40), (PROMPTS[4], 30), ([9] * 17, 40)]
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine, a_full_disk(monkeypatch):
        streams = [engine.generate(tokens, replace(LONG, max_new_tokens=count)) for tokens, count in load]
        step_until(engine, lambda: engine._swaps.error)
        waits, before = streams[2], len(streams[2]._pieces)
        while not streams[1].is_done:
            assert len(waits._pieces) == before
            engine.step()
        assert [stream.result().tokens for stream in streams] == [alone(engine, *each) for each in load]
        assert "No space left on device" in caplog.text
        require_all_free(engine)


def test_where_the_disk_is_full_and_nobody_can_go_on_the_last_one_fails_by_name(monkeypatch, preempted):
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        with a_full_disk(monkeypatch):
            streams = [engine.generate(tokens, LONG) for tokens in (PROMPTS[2], PROMPTS[6])]
            with pytest.raises(
                HeteroKVError, match=r"none can wait in .*hetero-kv-.*No space left.*set TMPDIR"
            ) as full:
                streams[1].result()
            assert str(engine._swaps._folder) in str(full.value)
        # With room on the disk again it is tried again.
        again = engine.generate(PROMPTS[6], LONG)
        assert [streams[0].result().tokens, again.result().tokens] == [
            alone(engine, tokens, 40) for tokens in (PROMPTS[2], PROMPTS[6])
        ]
        assert preempted
        require_all_free(engine)


def test_the_folder_is_private_and_files_go_with_their_requests(preempted):
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        streams = [engine.generate(tokens, LONG) for tokens in LOAD]
        step_until(engine, lambda: swapped_requests(engine))
        folder, cancelled = engine._swaps._folder, swapped_requests(engine)[0]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert cancelled.swapped.path.parent == folder
        before = len(cancelled.stream._pieces)
        cancelled.stream.cancel()
        engine.step()
        completion = cancelled.stream.result()
        assert (completion.finish_reason, len(completion.tokens)) == ("stopped", before)
        assert {request.swapped.path for request in swapped_requests(engine)} == set(folder.iterdir())
        for stream in streams:
            stream.result()
        assert list(folder.iterdir()) == []
    assert not folder.exists()


def test_closing_ends_requests_on_the_disk_and_removes_the_folder():
    engine = engine_of("dense", kv_tokens=ROOM)
    streams = [engine.generate(tokens, LONG) for tokens in LOAD]
    step_until(engine, lambda: swapped_requests(engine))
    folder = engine._swaps._folder
    engine.close()
    assert not folder.exists()
    assert {stream.result().finish_reason for stream in streams} <= {"stopped", "max_new_tokens"}
    require_all_free(engine)


def test_an_engine_that_nobody_closes_leaves_no_folder():
    engine = engine_of("dense", kv_tokens=ROOM)
    streams = [engine.generate(tokens, LONG) for tokens in LOAD]
    step_until(engine, lambda: swapped_requests(engine))
    folder, removal = engine._swaps._folder, engine._swaps._removal
    assert removal.atexit
    removal()
    assert not folder.exists()
    del streams


def test_a_sequence_that_is_damaged_on_the_disk_fails_its_request_alone():
    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        streams = [engine.generate(tokens, LONG) for tokens in LOAD]
        step_until(engine, lambda: swapped_requests(engine))
        bad = swapped_requests(engine)[0]
        content = bytearray(bad.swapped.path.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 64] = bytes(byte ^ 1 for byte in content[middle : middle + 64])
        bad.swapped.path.write_bytes(content)
        with pytest.raises(ContextError, match=r"waited for memory in .*hetero-kv-.*damaged.*set TMPDIR"):
            bad.stream.result()
        for tokens, stream in zip(LOAD, streams, strict=True):
            if stream is not bad.stream:
                assert stream.result().tokens == alone(engine, tokens, 40)
        require_all_free(engine)


@pytest.mark.parametrize("place", with_few(["write_context", "restore"]))
def test_an_interrupt_on_the_way_to_or_from_the_disk_loses_no_request(place, monkeypatch):
    from hetero_kv.serving import swapped

    with engine_of("dense", kv_tokens=ROOM, kept_prefixes=0) as engine:
        streams, original, calls = [engine.generate(tokens, LONG) for tokens in LOAD], getattr(swapped, place), []

        def interrupted(*arguments, **settings):
            calls.append(place)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return original(*arguments, **settings)

        monkeypatch.setattr(swapped, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step_until(engine, lambda: False)
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in LOAD]
        assert len(calls) > 1
        require_all_free(engine)
