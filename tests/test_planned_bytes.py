"""Planned bytes of layers, compared with the allocated ones."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.adapter import bridge
from hetero_kv.adapter.footprint import WindowFootprint
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.retrieval.footprint import bytes_per_token
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.planning.plan import (
    Footprint,
)
from hetero_kv.rules.injecting import inject
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from tests.support.caches import append, forward, new_cache, prefill
from tests.support.planned_models import K, footprint_of, llama_plan
from tests.support.slow_variants import with_few
from tests.support.tiny_models import ARCHITECTURES, tiny_model


@pytest.mark.parametrize(
    "model_type", with_few(ARCHITECTURES, ("llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"))
)
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


@pytest.mark.parametrize("representative_type", with_few(representatives.names(), quick=2))
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
    # Low-bit keys come with their block's mean.
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
            for operator, layer in zip(injection.attention_operators(), step.group.layers, strict=True):
                layer.store(step, keys, values)
                operator._finalize_blocks(layer, step)

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
    plan = llama_plan(on_gpu=True, sink_tokens=100, local_windows_len=300)
    like = torch.empty(1, 8, 0, 128, dtype=torch.bfloat16)
    window = DeviceWindow(128, 300, 128, like, like)
    assert plan.footprint.memory(10_000).windows == 32 * window.nbytes
    assert llama_plan(sink_tokens=100, local_windows_len=300).footprint.memory(10_000).windows == 0


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
    # One layer's at a time: the mask itself, its inputs, and attention's copy of it.
    assert largest <= footprint.memory(200, batch=2).masks <= 8 * largest
    replaced = Footprint.of(inject(tiny_model(architecture), "ktransformers"))
    assert replaced.memory(200).masks == 0
