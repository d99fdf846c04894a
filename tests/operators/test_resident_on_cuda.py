"""With `attend_on: gpu` a GPU chooses blocks and attends to them as the CPU does."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, eject
from hetero_kv.adapter.footprint import RESIDENT
from hetero_kv.evals.generation import greedy
from hetero_kv.gpu_ops.resident_slots import fetch
from hetero_kv.planning.footprint import Footprint
from hetero_kv.serving.forward import ModelForward
from tests.operators.resident_models import ALL, LAYERS, bytes_on_gpu, injected, llama_on_gpu, random_tokens, told
from tests.support.simulated_cuda import SimulatedCudaError
from tests.support.slow_variants import with_slow

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


def conversation(model, cache):
    """Logits of two turns, a fork, two rows, one of them, another cache and crops, with blocks that close meanwhile."""
    found = told(model, cache, random_tokens(64), prompt=60)
    found += told(model, cache, random_tokens(14, seed=1), prompt=9)
    fork = cache.fork()
    found += told(model, fork, random_tokens(1, seed=2)) + told(model, cache, random_tokens(1, seed=3))
    fork.select([0, 0])
    found += told(model, fork, random_tokens(5, rows=2, seed=4))
    fork.select([1])
    # Into the Context, whose last blocks get other tokens.
    fork.crop(-30)
    found += told(model, fork, random_tokens(28, seed=6), prompt=23)
    return torch.cat(found)


#: Two representatives, whole sequences in the first layer; one choice for all heads, the largest score of a group, of
#: several keys; nothing but the window; everything; the key that receives most attention, and the mean of several.
WAYS = {
    "quest": {},
    "shared": {"representative_type": "FIXED", "representative_num": 3, "head_select_mode": "SHARED"},
    "largest": {"representative_type": "MEAN", "representative_num": 1, "group_reduce": "max"},
    "streaming": {"top_k_blocks": 0},
    "dense": {"top_k_blocks": "all"},
    "ktransformers": {"recipe": "ktransformers"},
    "infllm": {"recipe": "infllm"},
}


@pytest.mark.parametrize("graphs", with_slow(["on", "off"], slow=["off"]))
@pytest.mark.parametrize("way", with_slow(list(WAYS), slow=["shared", "largest", "streaming", "dense", "infllm"]))
def test_a_conversation_is_that_with_the_cpu(llama, way, graphs):
    found = {}
    for attend_on in ("cpu", "gpu"):
        found[attend_on] = conversation(llama, injected(llama, attend_on, cuda_graphs=graphs, **WAYS[way]))
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)


#: Blocks stay packed in the slots: keys and values alike, keys as differences, and each of another format. Or
#: representatives stay packed.
PACKED = {
    "q8_0": {"kv_type": "Q8_0"},
    "q4_0": {"kv_type": "Q4_0"},
    "values": {"value_type": "Q4_0"},
    "keys": {"key_type": "Q8_0", "key_offset": "block_mean"},
    "differences": {"key_offset": "block_mean"},
    "representatives": {"representative_storage": "Q8_0"},
}


@pytest.mark.parametrize("way", with_slow(list(PACKED), slow=["values", "keys", "differences"]))
def test_packed_blocks_are_attended_to_as_by_the_cpu(gpu, way):
    model, found = llama_on_gpu(head_dim=32), {}
    settings = {"block_size": 16, "dense_layer_num": 0, "top_k_blocks": 2, **PACKED[way]}
    for attend_on in ("cpu", "gpu"):
        cache = injected(model, attend_on, cuda_graphs="on", **settings)
        found[attend_on] = conversation(model, cache)
        planned = Footprint.of(model.hetero_kv_injection).memory(400, 1).sizes
        if attend_on == "cpu":
            eject(model)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    assert planned[RESIDENT] == sum(bytes_on_gpu(cache))
    # What a block takes in DRAM crosses the bus.
    other, pool = HeteroCache(model), cache.layers[1].pool
    told(model, other, random_tokens(81), prompt=80)
    of_block = sum(array[0].nbytes for array in (pool.keys, pool.values, pool.key_offsets) if array is not None)
    assert other.statistics["dram_bytes_read"] == [2 * of_block] * LAYERS
    del cache, other, pool
    gc.collect()


@torch.no_grad()
def test_a_covering_budget_is_full_attention(llama):
    tokens = random_tokens(75)
    cache = DynamicCache(config=llama.config)
    expected = told(llama, cache, tokens, prompt=60)
    found = told(llama, injected(llama, top_k_blocks=ALL), tokens, prompt=60)
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_an_answer_whose_logits_are_read_has_them(llama):
    cache, prompt, seen = injected(llama, cuda_graphs="on"), random_tokens(60)[0].tolist(), []
    logits = ModelForward(llama).prompt(cache, prompt)
    found = greedy(llama, cache, logits[None], 7, (), lambda each: seen.append(each.cpu()))
    assert [int(each.argmax()) for each in seen] == found.tokens


def test_a_pool_that_is_written_while_it_is_read_is_seen(gpu, llama):
    cache = injected(llama)
    told(llama, cache, random_tokens(63), prompt=60)
    # After a token, whose kernels have been waited for, a block may be written.
    cache.layers[1].pool.keys.add_(0.0)
    resident, pool = cache.layers[1].resident, cache.layers[1].pool
    table = torch.arange(cache.layers[1].context_blocks, dtype=torch.int32, device="cuda")[None]
    chosen = torch.zeros_like(resident._ids)
    fetch(pool.keys, table, chosen, chosen, resident._slots.keys)
    pool.keys.add_(1.0)
    with pytest.raises(SimulatedCudaError, match="host memory was written while a kernel may still read it"):
        torch.cuda.synchronize()
