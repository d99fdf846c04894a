"""Each cache of a process plans around the memory that others reserve."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.reservations import NOTHING_RESERVED, Reserved, reserved_by_others
from hetero_kv.errors import OutOfMemoryError
from hetero_kv.planning.plan import RESERVE, Plan, resolve_max_seq_len
from hetero_kv.rules.injecting import inject
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("no_other_caches")

CONTEXT = 4096
PROMPT = torch.arange(2, 9)[None, :]


@pytest.fixture(scope="module")
def model():
    # Layers enough that what is stored is more than what a prompt takes on its way.
    model = tiny_model("llama", max_position_embeddings=CONTEXT, num_hidden_layers=24)
    inject(model, "ktransformers", command_line={"chunk_size": 256})
    return model


@pytest.fixture
def room_for(model, monkeypatch):
    """Let the system report free DRAM for this many contexts, independent of plans."""
    gc.collect()
    assert reserved_by_others(None) == NOTHING_RESERVED

    def free(contexts: float) -> int:
        plan = Plan.of(model.hetero_kv_injection)
        size = int((contexts * plan.resident_dram(CONTEXT) + plan.memory(CONTEXT).compute) / (1 - RESERVE))
        monkeypatch.setattr("hetero_kv.planning.plan.free_dram", lambda: size)
        return size

    return free


def ask(model, cache):
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)


def planned(model, caches):
    plan = Plan.of(model.hetero_kv_injection)
    return sum(plan.resident_dram(cache.max_seq_len) for cache in caches)


def test_one_cache_may_have_all_that_is_free(model, room_for):
    room_for(0.5)
    alone = HeteroCache(model)
    assert 0.5 * CONTEXT < alone.max_seq_len < 0.75 * CONTEXT
    length = alone.max_seq_len
    ask(model, alone)
    assert alone.max_seq_len == length


def test_six_conversations_share_what_is_free(model, room_for):
    free = room_for(3)
    caches = [HeteroCache(model) for _ in range(6)]
    for cache in caches:
        ask(model, cache)
    assert planned(model, caches) <= free * (1 - RESERVE)
    lengths = [cache.max_seq_len for cache in caches]
    assert max(lengths) - min(lengths) < 0.1 * CONTEXT
    assert min(lengths) > 0.4 * CONTEXT


def test_six_conversations_that_fit_have_the_models_context_each(model, room_for):
    room_for(6.5)
    caches = [HeteroCache(model) for _ in range(6)]
    for cache in caches:
        ask(model, cache)
    assert {cache.max_seq_len for cache in caches} == {CONTEXT}


def test_a_cache_without_free_memory_names_the_one_that_has_it(model, room_for):
    room_for(0.5)
    first = HeteroCache(model)
    ask(model, first)
    with pytest.raises(OutOfMemoryError) as refused:
        HeteroCache(model, max_seq_len=CONTEXT // 4)
    assert "GB reserved by 1 other caches of this process" in str(refused.value)
    first.reset()
    second = HeteroCache(model, max_seq_len=CONTEXT // 4)
    assert second.max_seq_len == CONTEXT // 4


def test_dropped_caches_free_their_memory(model, room_for):
    room_for(1.5)
    first = HeteroCache(model, max_seq_len=CONTEXT)
    with pytest.raises(OutOfMemoryError, match=r"max_seq_len \d+ would fit"):
        HeteroCache(model, max_seq_len=CONTEXT)
    first.itself = first
    del first
    assert HeteroCache(model, max_seq_len=CONTEXT).max_seq_len == CONTEXT


def test_forks_share_their_common_plan(model, room_for):
    room_for(1.2)
    first = HeteroCache(model, max_seq_len=CONTEXT)
    ask(model, first)
    forks = [first.fork() for _ in range(3)]
    assert reserved_by_others(None).caches == 1
    del first, forks


def test_allocated_memory_is_not_counted_twice(model, room_for):
    room_for(2)
    cache = HeteroCache(model, max_seq_len=CONTEXT)
    before = reserved_by_others(None).size
    with torch.no_grad():
        model((torch.arange(CONTEXT // 2) % 90 + 2)[None, :], past_key_values=cache)
    assert reserved_by_others(None).size == pytest.approx(before / 2, rel=0.05)


def test_caches_of_several_threads_are_not_promised_the_same(model, room_for):
    free = room_for(2.5)
    made, barrier = [], threading.Barrier(4)

    def make():
        barrier.wait()
        try:
            made.append(HeteroCache(model, max_seq_len=CONTEXT))
        except OutOfMemoryError:
            made.append(None)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    caches = [cache for cache in made if cache is not None]
    assert len(caches) == 2
    assert planned(model, caches) <= free * (1 - RESERVE)


@given(share=st.integers(0, 8), size=st.integers(0, 10**9), dram=st.integers(10**7, 10**9))
@settings(deadline=None, max_examples=50)
def test_an_equal_share_of_each_fits_with_the_reserved_memory(share, size, dram):
    injection = _PLANNED.hetero_kv_injection
    reserved = Reserved(size, 1, share)
    footprint = Plan.of(injection).footprint
    plan = Plan(footprint, dram, None, CONTEXT, reserved=reserved)
    if not plan.largest():
        return
    length = resolve_max_seq_len("auto", plan)
    memory = plan.memory(length)
    assert size + (1 + share) * memory.store + memory.compute <= dram * (1 - RESERVE)


_PLANNED = tiny_model("llama", max_position_embeddings=CONTEXT)
inject(_PLANNED, "ktransformers")


def test_a_common_store_takes_a_part_and_leaves_the_rest_to_the_next(model, room_for):
    room_for(16)
    common_store = model.hetero_kv_injection.common_store
    whole = common_store(sequences=32).tokens
    part = common_store(sequences=32, share=0.25)
    rest = common_store(sequences=32)
    # A prompt on its way takes some of either.
    assert 0.75 * whole / 4 < part.tokens <= whole / 4
    assert part.tokens + rest.tokens == pytest.approx(whole, rel=0.1)
