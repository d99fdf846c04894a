"""A retrieval prompt on a GPU: no pageable copy, no wait for its compute, no copy of the store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_kv import HeteroKVError
from hetero_kv.families.gpu_prefill import pieces
from hetero_kv.families.retrieval import representatives
from tests.support.simulated_cuda import Launch, Wait
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import injected, small_recipe

pytestmark = pytest.mark.cuda

#: Layers, kv heads and head dim of the tiny Llama; a chunk of `small_recipe`.
LAYERS, HEADS, DIM, CHUNK = 3, 2, 16, 64


@torch.no_grad()
def prompt(model, cache, tokens):
    ids = torch.arange(tokens, device="cuda")[None] % 90 + 2
    return model(ids, past_key_values=cache).logits


@pytest.mark.parametrize(("recipe", "beside"), with_slow([("quest", 0), ("infllm", 1)], slow=[("quest", 0)]))
def test_nothing_is_pageable_and_layers_wait_for_sent_pieces(gpu, llama_on_gpu, recipe, beside):
    cache = injected(llama_on_gpu, small_recipe(recipe, hidden_device="gpu"))
    # The device learns once whether Triton runs on it.
    prompt(llama_on_gpu, cache, 3)
    cache.reset()
    gpu.record.clear()
    # A layer sends each chunk of 64 in two pieces and the rest in another; once more the keys' received attention
    # and representatives.
    prompt(llama_on_gpu, cache, 2 * CHUNK + 3)
    assert not gpu.record.pageable
    assert not any(copy.is_blocking for copy in gpu.record.copies)
    assert len(gpu.record.waits) == LAYERS * (3 + 2 * beside)
    gpu.record.clear()
    prompt(llama_on_gpu, cache, 10)
    assert not gpu.record.pageable
    assert not any(copy.is_blocking for copy in gpu.record.copies)


def test_a_chunk_is_launched_before_the_one_before_has_left(gpu, llama_on_gpu):
    cache = injected(llama_on_gpu, small_recipe("quest", hidden_device="gpu"))
    prompt(llama_on_gpu, cache, 3)
    cache.reset()
    gpu.record.clear()
    prompt(llama_on_gpu, cache, 4 * CHUNK)
    order = [
        "flash" if isinstance(each, Launch) else "wait"
        for each in gpu.record.everything
        if isinstance(each, Wait) or (isinstance(each, Launch) and "flash" in each.name)
    ]
    # Two pieces are under way: the first wait of a layer is behind two chunks' attention, to itself and to its past.
    assert order[:4] == ["flash", "flash", "flash", "wait"]
    assert order[-1] == "wait"


def test_representatives_are_computed_where_the_keys_are(gpu, llama_on_gpu, monkeypatch):
    devices, known = [], representatives.get("QUEST")

    def compute(keys, *more):
        devices.append(keys.device.type)
        return known.compute(keys, *more)

    monkeypatch.setitem(representatives._REGISTRY, "QUEST", replace(known, compute=compute))
    prompt(llama_on_gpu, injected(llama_on_gpu, small_recipe("quest")), 150)
    assert set(devices) == {"cuda"}


def test_a_turn_never_has_a_copy_of_the_store_on_the_device(gpu, llama_on_gpu, monkeypatch):
    monkeypatch.setattr(pieces, "_TOKENS_AT_ONCE", 16)
    cache = injected(llama_on_gpu, small_recipe("quest"))
    prompt(llama_on_gpu, cache, 500)
    live = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prompt(llama_on_gpu, cache, 10)
    of_one_layer = 2 * HEADS * DIM * 2 * 500
    assert torch.cuda.max_memory_allocated() - live < of_one_layer / 2
    assert torch.cuda.memory_allocated() - live < 1024


def test_values_that_cannot_be_stored_are_refused_by_name(gpu, llama_on_gpu):
    rules = small_recipe("quest")
    cache = injected(llama_on_gpu, rules)
    prompt(llama_on_gpu, cache, 40)
    for layer in cache.layers:
        layer.value_storage = layer.key_storage = type(layer.key_storage)(
            **{**vars(layer.key_storage), "largest": 1e-6}
        )
    with pytest.raises(HeteroKVError, match=r"a key or value of .* exceeds the range of kv_type"):
        prompt(llama_on_gpu, cache, 40)
    assert cache.get_seq_length() == 40
