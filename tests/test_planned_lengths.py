"""The largest context that fits, for one sequence, a batch and its forks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.adapter.footprint import BytesPerToken, WindowFootprint
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.reservations import Reserved
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.planning.common_plan import CommonPlan
from hetero_kv.planning.plan import (
    RESERVE,
    OutOfMemoryError,
    Plan,
    resolve_max_seq_len,
)
from hetero_kv.rules.injecting import inject
from tests.support.planned_models import K, footprint_of, llama_plan
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("no_other_caches")

PAGED = PagedFootprint(KVShape(2, 64, 64), stored=BytesPerToken(256, 256, 4), block_size=128, device_window=1000)


def test_prefill_holds_two_hidden_buffers_and_one_layer_whatever_the_length():
    footprint = llama_plan().footprint
    short, long = footprint.memory(8 * K), footprint.memory(16 * K)
    assert long.layer_kv == 2 * short.layer_kv == 16 * K * 8 * 256 * 2
    assert long.hidden == 2 * short.hidden >= 2 * 16 * K * 4096 * 2
    assert long.activations == short.activations


def test_activations_follow_the_chunk():
    assert llama_plan(chunk_size=K).footprint.memory(9 * K).activations * 4 == (
        llama_plan(chunk_size=4 * K).footprint.memory(9 * K).activations
    )


@given(
    dram=st.integers(10**6, 10**12),
    gpu=st.none() | st.integers(10**6, 10**12),
    weights=st.integers(0, 10**8),
    layers=st.integers(1, 40),
)
@settings(deadline=None, max_examples=50)
def test_the_largest_context_fits_and_one_token_more_does_not(dram, gpu, weights, layers):
    plan = Plan(footprint_of([PAGED] * layers, on_gpu=gpu is not None, weights=weights), dram, gpu, 10**5)
    largest = plan.largest()
    assert largest == 0 or plan.fits(largest)
    assert not plan.fits(largest + 1)


def test_auto_is_the_models_context_or_what_fits_if_that_is_less():
    footprint = footprint_of([PAGED] * 10)
    assert resolve_max_seq_len("auto", Plan(footprint, 10**12, None, 5000)) == 5000
    short = Plan(footprint, 10**7, None, 5000)
    assert resolve_max_seq_len("auto", short) == short.largest() < 5000


def test_a_length_that_does_not_fit_is_refused_with_the_one_that_would():
    plan = Plan(footprint_of([PAGED] * 10), 10**8, None, 5000)
    with pytest.raises(OutOfMemoryError, match=r"max_seq_len is 50000: 50000 tokens take .* GB of DRAM") as refused:
        resolve_max_seq_len(50_000, plan)
    number = int(str(refused.value).rsplit("max_seq_len ", 1)[1].split()[0])
    assert resolve_max_seq_len(number, plan) == number
    assert f"{RESERVE:.0%} of the free memory, less the weights, is kept in reserve" in str(refused.value)


def test_the_gpu_is_named_when_it_is_what_is_too_small():
    plan = Plan(footprint_of([PAGED] * 10, on_gpu=True), 10**12, 10**8, 5000)
    with pytest.raises(OutOfMemoryError, match=r"GB of the GPU's memory, and 0\.10 GB are free"):
        resolve_max_seq_len(10**6, plan)


def test_where_nothing_fits_the_error_says_so():
    with pytest.raises(OutOfMemoryError, match="not even one token fits"):
        resolve_max_seq_len("auto", Plan(footprint_of([PAGED], weights=10**9), 10**8, None, 5000))


def test_a_budget_bounds_what_is_kept_whatever_is_free():
    plan = Plan(footprint_of([PAGED] * 10), 10**12, None, 5000, budget=10**7)
    largest = plan.largest()
    assert plan.resident_dram(largest) <= 10**7 < plan.resident_dram(largest + 1)
    with pytest.raises(OutOfMemoryError, match=r"5000 tokens keep .* GB of DRAM, and dram_budget_gb is 0\.01; max_seq"):
        resolve_max_seq_len(5000, plan)
    beside = replace(plan, reserved=Reserved(planned=4 * 10**6))
    assert beside.resident_dram(beside.largest()) <= 6 * 10**6 < beside.resident_dram(beside.largest() + 1)


def test_caches_of_a_process_share_its_budget():
    model = tiny_model("llama", max_position_embeddings=4096)
    inject(model, "ktransformers", command_line={"max_seq_len": 1000, "dram_budget_gb": 0.005})
    kept = Plan.of(model.hetero_kv_injection).resident_dram(1000)
    caches = [HeteroCache(model) for _ in range(int(0.005e9 // kept))]
    with pytest.raises(OutOfMemoryError, match=r"besides .* GB of other caches, and dram_budget_gb is 0\.005"):
        HeteroCache(model)
    caches.pop()
    HeteroCache(model)


def test_a_budget_that_is_too_small_is_named_with_its_remedy():
    plan = Plan(footprint_of([PAGED] * 10), 10**12, None, 5000, budget=0)
    with pytest.raises(OutOfMemoryError, match=r"not even one token fits: raise dram_budget_gb$"):
        resolve_max_seq_len("auto", plan)


def test_a_batch_and_its_forks_take_stores_of_their_own_and_one_prefill():
    footprint = footprint_of([PAGED] * 10)
    one, batch, forked = footprint.memory(1000), footprint.memory(1000, batch=4), footprint.memory(1000, forks=4)
    assert batch.store == 4 * one.store
    assert batch.compute == 4 * one.compute
    assert forked.store == 5 * one.store
    assert forked.compute == one.compute


@given(batch=st.integers(1, 6), forks=st.integers(0, 4), dram=st.integers(10**7, 10**9))
@settings(deadline=None, max_examples=50)
def test_a_refusal_names_a_length_a_batch_and_a_number_of_forks_that_fit(batch, forks, dram):
    plan = Plan(footprint_of([PAGED] * 10), dram, None, 5000, batch, forks)
    if plan.fits(20_000):
        assert resolve_max_seq_len(20_000, plan) == 20_000
        return
    with pytest.raises(OutOfMemoryError, match="max_seq_len is 20000") as refused:
        resolve_max_seq_len(20_000, plan)
    remedy = str(refused.value).rsplit("; ", 1)[1]
    length = re.search(r"max_seq_len (\d+)", remedy)
    if length is not None:
        assert plan.fits(int(length[1]))
    for name, found in (("batch", r"a batch of (\d+)"), ("forks", r"(\d+) forks")):
        number = re.search(found, remedy)
        least = 1 if name == "batch" else 0
        fitting = [n for n in range(least, getattr(plan, name)) if replace(plan, **{name: n}).fits(20_000)]
        assert (number is None) == (not fitting)
        assert number is None or int(number[1]) == max(fitting)


def injected_with_room(monkeypatch, max_seq_len, **for_):
    """A tiny model with room in DRAM for a batch or forks of 4,096 tokens, and somewhat more."""
    model = tiny_model("llama", max_position_embeddings=4096)
    injection = inject(model, "ktransformers", command_line={"max_seq_len": max_seq_len})
    room = Plan.of(injection, **for_).dram_needed(4096) / (1 - RESERVE) + 10**5
    monkeypatch.setattr("hetero_kv.planning.plan.free_dram", lambda: int(room))
    return model


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_processed(monkeypatch):
    model = injected_with_room(monkeypatch, 4096, batch=3)
    cache = HeteroCache(model)
    with pytest.raises(
        OutOfMemoryError, match=r"5 sequences of 4096 tokens .*; max_seq_len \d+, or a batch of 3 would"
    ):
        model(torch.randint(2, 90, (5, 7)), past_key_values=cache)
    assert not any(layer.is_initialized for layer in cache.layers)
    with torch.no_grad():
        model(torch.randint(2, 90, (3, 7)), past_key_values=cache)
    assert cache.layers[0].pool.num_blocks == 3 * 4096 // 128


def test_auto_is_shorter_for_a_batch(monkeypatch):
    model = injected_with_room(monkeypatch, "auto", batch=2)
    cache = HeteroCache(model)
    assert cache.max_seq_len == 4096
    with torch.no_grad():
        model(torch.randint(2, 90, (4, 7)), past_key_values=cache)
    assert 1024 < cache.max_seq_len < 2200
    assert Plan.of(model.hetero_kv_injection, batch=4).fits(cache.max_seq_len)


def test_forks_are_planned_for(monkeypatch):
    model = injected_with_room(monkeypatch, 4096, forks=2)
    with pytest.raises(OutOfMemoryError, match=r"6 sequences of 4096 tokens .*, or 2 forks would fit"):
        HeteroCache(model, forks=5)
    HeteroCache(model, forks=2)


def test_a_full_store_is_refused_before_it_is_made(monkeypatch):
    model = tiny_model("llama")
    inject(model, "ktransformers", command_line={"max_seq_len": 10**9})
    monkeypatch.setattr("hetero_kv.planning.plan.free_dram", lambda: 10**9)
    with pytest.raises(OutOfMemoryError, match=r"max_seq_len \d+ would fit"):
        HeteroCache(model)


def test_a_budget_is_for_the_whole_process_whichever_model_has_it():
    first, second = tiny_model("llama", max_position_embeddings=4096), tiny_model("llama", max_position_embeddings=4096)
    inject(first, "ktransformers", command_line={"max_seq_len": 1000, "dram_budget_gb": 0.005})
    inject(second, "ktransformers", command_line={"max_seq_len": 1000})
    kept = Plan.of(first.hetero_kv_injection).resident_dram(1000)
    caches = [HeteroCache(first)]
    caches += [HeteroCache(second) for _ in range(int(0.005e9 // kept) - 1)]
    with pytest.raises(OutOfMemoryError, match=r"besides .* GB of other caches, and dram_budget_gb is 0\.005"):
        HeteroCache(second)


def test_windows_count_for_each_sequence_of_a_common_store_and_blocks_for_all_together():
    window = WindowFootprint(KVShape(2, 64, 64), sliding_window=1000, is_untouched=True)
    footprint, tokens = footprint_of([PAGED, window]), 8 * 80 * 128
    memory = CommonPlan(footprint, 10**12, None, 10**5, batch=8, longest=50_000).memory(tokens)
    assert memory.sliding == 8 * footprint.memory(tokens).sliding
    assert memory.keys_values == footprint.memory(tokens).keys_values
    # One prompt passes at a time, and not all sequences together.
    assert memory.hidden == footprint.memory(50_000).hidden


def test_a_common_store_that_does_not_fit_names_what_would():
    window = WindowFootprint(KVShape(2, 64, 64), sliding_window=1000, is_untouched=True)
    plan = CommonPlan(footprint_of([PAGED, window]), 10**12, None, 10**5, batch=8, budget=10**7)
    largest = plan.largest()
    assert 0 < largest < 8000
    with pytest.raises(
        OutOfMemoryError,
        match=f"kv_tokens is 8000: 8 sequences with 8000 tokens together keep .*; kv_tokens {largest}, or a batch of .",
    ):
        resolve_max_seq_len(8000, plan, "kv_tokens")
