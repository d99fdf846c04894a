"""What a context takes, against what is really allocated, and the largest that fits."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from caches import append, forward, new_cache, prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.adapter import bridge
from hetero_kv.adapter.footprint import BytesPerToken, WindowFootprint
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.choosing import Derived
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.retrieval.footprint import PagedFootprint, bytes_per_token
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.planning.plan import (
    RESERVE,
    Footprint,
    OutOfMemoryError,
    Plan,
    resolve_max_seq_len,
)
from hetero_kv.rules.injection import inject
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool

K = 1024
INTERNLM_7B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 92544,
    "max_position_embeddings": K * K,
}
LLAMA_8B = {**INTERNLM_7B, "vocab_size": 128256}
LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 128 * K,
}


def without_weights(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def llama_plan(shape=INTERNLM_7B, dram=10**15, gpu=None, on_gpu=False, **overrides):
    model = without_weights(AutoConfig.for_model("llama", **shape))
    footprint = Footprint.of(
        inject(model, "ktransformers", command_line=overrides), dtype=torch.bfloat16, on_gpu=on_gpu
    )
    return Plan(footprint, dram, gpu, shape["max_position_embeddings"])


@pytest.mark.parametrize(
    ("thousands", "article", "last_digit"),
    [(4, 0.5, 0.1), (32, 4.29, 0.01), (64, 8.58, 0.01), (128, 17.1, 0.1), (512, 68.7, 0.1), (1024, 137.4, 0.1)],
)
def test_the_table_of_the_article_for_a_7b_model_is_reproduced(thousands, article, last_digit):
    gigabytes = llama_plan().footprint.memory(thousands * K).keys_values / 1e9
    assert 0 <= gigabytes - article < last_digit


def test_a_70b_model_is_planned_without_its_weights():
    before = psutil.Process().memory_info().rss
    footprint = llama_plan(LLAMA_70B, on_gpu=True).footprint
    assert footprint.weights == pytest.approx(70.55e9 * 2, rel=1e-3)
    assert footprint.bytes_per_token.keys == footprint.bytes_per_token.values == 80 * 8 * 128 * 2
    assert psutil.Process().memory_info().rss - before < 1e9


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_layer_takes_what_its_pool_takes(model_type):
    model = tiny_model(model_type)
    injection = inject(model, "ktransformers", command_line={"block_size": 4, "max_seq_len": 64})
    footprint = Footprint.of(injection)
    cache = HeteroCache(model)
    with torch.no_grad():
        model(torch.randint(2, 90, (1, 13)), past_key_values=cache)
    paged = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    assert len(paged) == sum(layer.block_size is not None for layer in footprint.layers)
    assert footprint.memory(13).store == sum(layer.bytes_touched for layer in paged)
    for kept, planned in zip(cache.layers, footprint.layers, strict=True):
        keys, values = (
            (kept.pool.keys, kept.pool.values) if isinstance(kept, RetrievalLayer) else (kept.keys, kept.values)
        )
        assert planned.shape == KVShape(keys.shape[1], keys.shape[3], values.shape[3])


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_model_without_weights_is_planned_as_the_loaded_one(model_type):
    model = tiny_model(model_type)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    planned = Footprint.of(inject(without_weights(model.config), "ktransformers"))
    loaded = Footprint.of(inject(model, "ktransformers"))
    assert planned.weights == weights
    assert loaded.weights == 0
    assert planned.layers == loaded.layers
    assert planned.memory(1000).store == loaded.memory(1000).store
    assert planned.memory(1000).compute - planned.weights == loaded.memory(1000).compute


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("gigabytes", [17, 20, 24, 48])
def test_a_model_is_planned_for_the_length_that_its_run_accepts(on_gpu, gigabytes):
    plan = llama_plan(dram=gigabytes * 10**9, gpu=gigabytes * 10**9 if on_gpu else None, on_gpu=on_gpu)
    weights = plan.footprint.weights
    loaded = replace(
        plan,
        footprint=replace(plan.footprint, weights=0),
        **({"gpu": plan.gpu - weights} if on_gpu else {"dram": plan.dram - weights}),
    )
    assert plan.largest() == loaded.largest() > 0


def test_the_settings_for_a_gpu_with_24_gb_fit_into_24_gb():
    model = without_weights(AutoConfig.for_model("llama", **INTERNLM_7B))
    injection = inject(model, "gpu-24gb")
    footprint = Footprint.of(injection, dtype=torch.bfloat16, on_gpu=True)
    assert Plan(footprint, 64 * 10**9, 24 * 10**9, K * K).fits(injection.engine.max_seq_len)


def test_a_million_tokens_of_an_8b_model_fit_into_24_gb():
    model = without_weights(AutoConfig.for_model("llama", **LLAMA_8B))
    footprint = Footprint.of(inject(model, "gpu-24gb-1m"), dtype=torch.bfloat16, on_gpu=True)
    memory = footprint.memory(K * K)
    assert memory.weights > 16e9
    assert memory.compute <= 21.6e9
    assert Plan(footprint, 192 * 10**9, 24 * 10**9, K * K).fits(K * K)
    # Between the layers, hidden states that stayed on the GPU would be another 17 GB.
    assert replace(footprint, hidden_device="gpu").memory(K * K).compute > 37e9


def test_a_70b_model_prefills_on_a_gpu_with_24_gb():
    model = without_weights(AutoConfig.for_model("llama", **LLAMA_70B))
    injection = inject(model, "ktransformers", command_line={"chunk_size": 2 * K, "max_seq_len": 128 * K})
    footprint = Footprint.of(injection, dtype=torch.bfloat16, on_gpu=True, gpu=24 * 10**9)
    memory = footprint.memory(128 * K)
    # Embeddings and head of 4.2 GB, two layers of 1.7 GB each; the others in DRAM.
    assert 7e9 < memory.weights < 8e9
    assert memory.weights_in_dram > 136e9
    assert Plan(footprint, 256 * 10**9, 24 * 10**9, 128 * K).fits(128 * K)
    assert not Plan(footprint, 160 * 10**9, 24 * 10**9, 128 * K).fits_dram(128 * K)
    on_gpu = Footprint.of(injection, dtype=torch.bfloat16, on_gpu=True, gpu=200 * 10**9).memory(128 * K)
    assert (on_gpu.weights_in_dram, on_gpu.weights > 140e9) == (0, True)


@pytest.mark.parametrize("where", ["auto", "gpu", "dram"])
def test_a_longer_context_never_takes_less_of_a_gpu(where):
    footprint = llama_plan(on_gpu=True, hidden_device=where, chunk_size=K).footprint
    sizes = [footprint.memory(tokens).compute for tokens in range(K // 2, 4 * K, 64)]
    assert where == "dram" or sizes == sorted(sizes)
    assert footprint.memory(64 * K).hidden < 0.2e9 or where == "gpu"


@pytest.mark.parametrize("representative_type", representatives.names())
@pytest.mark.parametrize("kv_type", storage.names())
def test_bytes_per_token_are_those_of_the_pool(kv_type, representative_type):
    count = representatives.get(representative_type).counts[0]
    kinds = {"kv_type": kv_type, "representative_type": representative_type, "representative_num": count}
    overrides = {"block_size": 32, "local_windows_len": 32, **kinds}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=64, vocab_size=99, **shape)
    injection = inject(AutoModelForCausalLM.from_config(config).eval(), "ktransformers", command_line=overrides)
    cache = HeteroCache(injection.model, 1000)
    layer = cache.layers[0]
    append(cache, torch.randn(1, 2, 96, 64), torch.randn(1, 2, 96, 64))
    footprint = Footprint.of(injection)
    kind = storage.get(kv_type)
    # Keys of few bits have their block's mean beside them.
    offset = 2 * 64 / 32 if kv_type == "Q4_0" else 0
    assert footprint.bytes_per_token.values == 2 * 2 * kind.bytes_per_vector(64)
    assert footprint.bytes_per_token.keys == footprint.bytes_per_token.values + 2 * 2 * offset
    assert footprint.memory(96).store == 2 * layer.bytes_touched
    assert footprint.bytes_per_token.total == 2 * layer.bytes_touched / 96


@given(
    kv_type=st.sampled_from(storage.names()),
    shape=st.builds(KVShape, st.integers(1, 8), st.sampled_from([32, 64, 192]), st.sampled_from([32, 128])),
    block_size=st.sampled_from([8, 24, 128]),
    representative_num=st.integers(0, 5),
    accumulates=st.booleans(),
    derived=st.builds(Derived, st.booleans(), st.booleans(), st.booleans()),
    value_type=st.sampled_from(storage.names()),
    offset_keys=st.booleans(),
    representative_storage=st.sampled_from([None, storage.FP32, storage.Q8_0]),
)
@settings(deadline=None)
def test_the_footprints_bytes_per_token_are_those_that_a_pool_allocates(
    kv_type, shape, block_size, representative_num, accumulates, derived, value_type, offset_keys,
    representative_storage,
):  # fmt: skip
    kind, value_kind = storage.get(kv_type), storage.get(value_type)
    dims = shape.kv_heads, block_size, shape.k_dim, shape.v_dim
    counts = representative_num, accumulates
    pool = BlockPool(
        3, *dims, kind, *counts, *derived, value_storage=value_kind, offset_keys=offset_keys,
        representative_storage=representative_storage,
    )  # fmt: skip
    kinds = derived, value_kind, offset_keys, representative_storage
    planned = bytes_per_token(shape, kind, block_size, *counts, *kinds)
    assert planned.total * block_size == pytest.approx(pool.bytes_per_block, rel=1e-12)
    offsets = pool.key_offsets[0].nbytes if offset_keys else 0
    assert planned.keys * block_size == pytest.approx(pool.keys[0].nbytes + offsets, rel=1e-12)
    assert planned.values * block_size == pool.values[0].nbytes


def resident():
    """Memory of this process, bytes, without what the C library keeps of freed memory."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_memory_grows_by_what_is_planned_for_the_store():
    length, shape = (
        32 * K,
        {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128},
    )
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=64, vocab_size=99, **shape)
    injection = inject(AutoModelForCausalLM.from_config(config).eval(), "ktransformers")
    keys, values = torch.randn(1, 8, K, 128), torch.randn(1, 8, K, 128)
    # Scratch memory that the first tokens bring in, and those of the Context, is not the store's.

    def stored(cache):
        """Tokens in every layer, and the representatives of blocks that they close."""
        with forward(cache, 1, K) as step:
            for operator, layer in zip(injection.attention_operators(), step.cohort.layers, strict=True):
                layer.store(step, keys, values)
                operator._close_blocks(layer, step)

    warm = HeteroCache(injection.model, 8 * K)
    for _ in range(8):
        stored(warm)
    cache = HeteroCache(injection.model, length)
    before = resident()
    for _ in range(length // K):
        stored(cache)
    growth = resident() - before
    planned = Footprint.of(injection).memory(length).store
    assert planned > 250e6
    assert growth == pytest.approx(planned, rel=0.01)


def test_the_window_on_a_gpu_is_what_is_planned():
    plan = llama_plan(on_gpu=True, initial_len=100, local_windows_len=300)
    like = torch.empty(1, 8, 0, 128, dtype=torch.bfloat16)
    window = DeviceWindow(128, 300, 128, like, like)
    assert plan.footprint.memory(10_000).windows == 32 * window.nbytes
    assert llama_plan(initial_len=100, local_windows_len=300).footprint.memory(10_000).windows == 0


@pytest.mark.parametrize("length", [5, 16, 17, 100])
def test_sliding_layers_take_what_their_buffers_take(length):
    cache = new_cache(lambda: WindowLayer(16))
    layer = cache.layers[0]
    prefill(cache, torch.randn(1, 2, length, 8))
    planned = WindowFootprint(KVShape(2, 8, 8), sliding_window=16)
    footprint = footprint_of([planned], element=4)
    token = 2 * 2 * 8 * 4
    assert layer.dram_bytes <= footprint.memory(length).sliding <= layer.dram_bytes + token
    assert footprint.memory(10**6).sliding == footprint.memory(100).sliding
    assert footprint.memory(length).store == 0


def test_layers_that_rules_leave_alone_take_memory_where_the_model_computes():
    leave_first = {
        "rules": [
            {"match": {"name": r"layers\.0\.self_attn$"}, "replace": {"class": "default"}},
            {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
            {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
        ]
    }
    footprint = Footprint.of(inject(tiny_model("llama"), parse_rules(leave_first)))
    assert footprint.memory(100).untouched == 100 * 2 * 2 * 16 * 4
    assert len([layer for layer in footprint.layers if layer.block_size]) == 2


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_the_masks_of_layers_that_rules_leave_alone_are_planned(architecture, monkeypatch):
    model, masks, made = tiny_model(architecture), [], bridge.chunk_mask
    monkeypatch.setattr(bridge, "chunk_mask", lambda *args: masks.append(made(*args)) or masks[-1])
    leave_two = {
        "rules": [
            {"match": {"name": r"layers\.[01]\.self_attn$"}, "replace": {"class": "default"}},
            {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
            {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
        ],
        "long_context": {"chunk_size": 16, "max_seq_len": 256},
    }
    footprint = Footprint.of(inject(model, parse_rules(leave_two)))
    with torch.no_grad():
        model(torch.randint(2, 90, (2, 200)), past_key_values=HeteroCache(model))
    largest = max(mask.nbytes for mask in masks if mask is not None)
    # One layer's at a time; beside the mask itself, what it is made from and what attention makes of it.
    assert largest <= footprint.memory(200, batch=2).masks <= 8 * largest
    replaced = Footprint.of(inject(tiny_model(architecture), "ktransformers"))
    assert replaced.memory(200).masks == 0


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


def footprint_of(layers, element=2, on_gpu=False, weights=0):
    shape = {"chunk_size": 512, "hidden_size": 64, "rotary_dim": 8, "heads": 4, "activations": 1000}
    return Footprint(
        tuple(layers), weights, element, **shape, on_gpu=on_gpu, hidden_device="gpu", keeps_tables=False, tiles=False
    )


PAGED = PagedFootprint(KVShape(2, 64, 64), stored=BytesPerToken(256, 256, 4), block_size=128, device_window=1000)


@given(
    dram=st.integers(10**6, 10**12),
    gpu=st.none() | st.integers(10**6, 10**12),
    weights=st.integers(0, 10**8),
    layers=st.integers(1, 40),
)
@settings(deadline=None)
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
    assert f"{RESERVE:.0%} of what is free beside the weights is kept in reserve" in str(refused.value)


def test_the_gpu_is_named_when_it_is_what_is_too_small():
    plan = Plan(footprint_of([PAGED] * 10, on_gpu=True), 10**12, 10**8, 5000)
    with pytest.raises(OutOfMemoryError, match=r"GB of the GPU's memory, and 0\.10 GB are free"):
        resolve_max_seq_len(10**6, plan)


def test_where_nothing_fits_the_error_says_so():
    with pytest.raises(OutOfMemoryError, match="not even one token fits"):
        resolve_max_seq_len("auto", Plan(footprint_of([PAGED], weights=10**9), 10**8, None, 5000))


def test_head_dim_multi_query_and_latent_attention_are_read_from_the_config():
    own_head_dim = AutoConfig.for_model("qwen3", head_dim=96, num_attention_heads=8, num_key_value_heads=2)
    assert KVShape.of(own_head_dim) == KVShape(2, 96, 96)
    deepseek = AutoConfig.for_model("deepseek_v3", num_attention_heads=8, num_key_value_heads=8)
    assert KVShape.of(deepseek) == KVShape(8, 128 + 64, 128)
    assert KVShape.of(AutoConfig.for_model("gpt_bigcode", multi_query=True)).kv_heads == 1


def test_layers_of_different_shapes_are_told_apart():
    model = without_weights(AutoConfig.for_model("gemma4_text"))
    shapes = {layer.shape for layer in Footprint.of(inject(model, "ktransformers")).layers}
    assert len(shapes) == 2


def test_a_batch_and_its_forks_take_stores_of_their_own_and_one_prefill():
    footprint = footprint_of([PAGED] * 10)
    one, batch, forked = footprint.memory(1000), footprint.memory(1000, batch=4), footprint.memory(1000, forks=4)
    assert batch.store == 4 * one.store
    assert batch.compute == 4 * one.compute
    assert forked.store == 5 * one.store
    assert forked.compute == one.compute


@given(batch=st.integers(1, 6), forks=st.integers(0, 4), dram=st.integers(10**7, 10**9))
@settings(deadline=None)
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
