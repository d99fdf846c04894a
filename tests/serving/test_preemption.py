"""Where memory is short, requests wait on the disk, and still get the tokens that they get alone."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from hetero_kv import HeteroCache, SamplingParams
from hetero_kv.contexts import writing
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.serving import memory
from hetero_kv.serving.swapped import SwapFolder
from tests.serving.test_engine import PROMPTS, alone, engine_of
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few
from tests.support.small_recipes import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread")

AHEAD = 6
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
#: Prompts of 61, 130, 17, 61 and 90 tokens: room for two or three of them, and not for all answers.
LOAD, ROOM = [PROMPTS[index] for index in (1, 2, 4, 5, 6)], 248


@pytest.fixture(autouse=True)
def short_reserve(monkeypatch):
    monkeypatch.setattr(memory, "AHEAD", AHEAD)


@pytest.fixture
def preempted(monkeypatch):
    """The lengths of the sequences that went to the disk."""
    lengths, put = [], SwapFolder.put

    def counting(folder, cache):
        swapped = put(folder, cache)
        lengths.extend([] if swapped is None else [swapped.tokens])
        return swapped

    monkeypatch.setattr(SwapFolder, "put", counting)
    return lengths


@contextmanager
def a_full_disk(monkeypatch):
    """Files are written half."""

    def full(path, *_, **__):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_tensors", full)
        yield


def require_all_free(engine):
    for allocator in engine._store.allocators.values():
        assert allocator.free_blocks == allocator.num_blocks


def swapped_requests(engine):
    return [request for request in engine._scheduler.queues.waiting if request.swapped is not None]


def step_until(engine, reached):
    for _ in range(2000):
        if reached():
            return
        assert engine.step()
    raise AssertionError("it was not reached")


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
        [("shadowkv", "llama"), ("infinipot", "llama"), ("quest", "qwen3_5_text")],
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
        streams = [engine.generate(tokens, LONG) for tokens in (PROMPTS[2], PROMPTS[6], PROMPTS[0])]
        step_until(engine, lambda: preempted)
        scheduler = engine._scheduler
        assert [request.stream for request in scheduler.queues.running] == streams[:1]
        assert [request.stream for request in scheduler.queues.waiting] == streams[1:]
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
        step_until(engine, lambda: engine._scheduler.queues.prefilling is not None)
        step_until(engine, lambda: engine._scheduler.queues.prefilling is None)
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
            rows = [*engine._scheduler.queues.running, engine._scheduler.queues.prefilling]
            assert sum(-(-row.most_stored // 8) * 8 for row in rows if row is not None) <= ROOM
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in LOAD]
        assert not preempted


# -- the disk


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
