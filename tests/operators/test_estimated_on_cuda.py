"""With `attend_on: gpu` a GPU chooses single tokens by estimated attention masses as the CPU does."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hetero_kv import eject
from hetero_kv.adapter.footprint import RESIDENT
from hetero_kv.engine.attention_record import AttentionRecord
from hetero_kv.families.retrieval import decode
from hetero_kv.planning.footprint import Footprint
from tests.operators.resident_models import ALL, LAYERS, bytes_on_gpu, injected, llama_on_gpu, random_tokens, told
from tests.operators.test_resident_on_cuda import conversation
from tests.support.devices import model_on, simulated_cuda
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

SHARP = 4.0
#: Blocks that have coarse keys; no layer attends to all of its Context.
SIZES = {
    "block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "top_k_blocks": 3, "min_blocks": 0,
    "max_dense_blocks": 0,
}  # fmt: skip


@pytest.fixture
def llama(gpu):
    model = llama_on_gpu(head_dim=32)
    for layer in model.model.layers:
        # Peaked attention, of which few tokens have most.
        layer.self_attn.q_proj.weight.mul_(SHARP)
    yield model
    # Caches unlock their memory while the GPU is there.
    gc.collect()


def estimating(model, attend_on="gpu", recipe="adaptive", **settings):
    return injected(model, attend_on, recipe, **{**SIZES, **settings})


#: Both recipes; values that stay packed; as many tokens as fit; means without deviations; a layer that attends to
#: everything; keys and values that stay packed, of which those in four bits are scored as they are, as differences or
#: whole; and differences in other formats.
WAYS = {
    "adaptive": {"target_mass": 0.99, "top_k_blocks": 1},
    "adaptive_lean": {"recipe": "adaptive_lean", "block_size": 32, "sink_tokens": 32},
    "values": {"value_type": "Q8_0", "top_k_blocks": 1},
    "budget": {"target_mass": "none", "top_k_blocks": 1},
    "means": {"rerank": 2, "top_k_blocks": 1, "representative_storage": "FP16"},
    "dense layer": {"dense_layer_num": 1},
    "q8_0": {"kv_type": "Q8_0", "value_type": "Q8_0", "top_k_blocks": 1},
    "q4_0": {"kv_type": "Q4_0", "value_type": "Q4_0", "target_mass": 0.99, "top_k_blocks": 1},
    "lean q4_0": {"recipe": "adaptive_lean", "block_size": 32, "sink_tokens": 32, "kv_type": "Q4_0"},
    "whole q4_0": {"key_type": "Q4_0", "key_offset": "none", "top_k_blocks": 1},
    "differences": {"key_offset": "block_mean", "value_type": "Q4_0", "top_k_blocks": 1},
    "q8_0 differences": {"kv_type": "Q8_0", "key_offset": "block_mean", "top_k_blocks": 1},
}
_SLOW = ["values", "budget", "means", "whole q4_0", "differences", "q8_0 differences"]


@pytest.mark.parametrize("graphs", with_slow(["on", "off"], slow=["off"]))
@pytest.mark.parametrize("way", with_slow(list(WAYS), slow=_SLOW))
def test_a_conversation_and_its_statistics_are_those_with_the_cpu(llama, way, graphs):
    found, told_of = {}, {}
    for attend_on in ("cpu", "gpu"):
        cache = estimating(llama, attend_on, cuda_graphs=graphs, **WAYS[way])
        found[attend_on] = conversation(llama, cache)
        told_of[attend_on] = cache.statistics
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    for name in ("estimated_share", "attended_blocks", "read_bytes"):
        if way == "budget" and name == "attended_blocks":
            continue
        expected = [each if each is None else pytest.approx(each, rel=1e-5) for each in told_of["cpu"][name]]
        assert told_of["gpu"][name] == expected, name


def test_long_contexts_are_attended_to_in_part_as_by_the_cpu(llama):
    found, told_of = {}, {}
    for attend_on in ("cpu", "gpu"):
        cache = estimating(llama, attend_on, max_seq_len=500, target_mass=0.95)
        found[attend_on] = torch.cat(told(llama, cache, random_tokens(330), prompt=310))
        told_of[attend_on] = cache.statistics
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    # Some tokens, not all that fit; each crosses the bus once or is there.
    attended, read = told_of["gpu"]["attended_blocks"], told_of["gpu"]["dram_bytes_read"]
    assert attended == pytest.approx(told_of["cpu"]["attended_blocks"])
    of_block = 2 * 16 * 32 * 2 * 4
    for blocks, nbytes in zip(attended, read, strict=True):
        assert 0.1 < blocks < 3
        assert 0 < nbytes <= blocks * of_block


@pytest.mark.parametrize("way", with_slow(["q8_0", "q4_0", "adaptive", "lean q4_0"], slow=["adaptive", "lean q4_0"]))
def test_the_chosen_tokens_are_the_cpus(llama, way, monkeypatch):
    tokens, by_cpu = random_tokens(161), []
    cache = estimating(llama, "cpu", **WAYS[way])
    told(llama, cache, tokens[:, :160], prompt=160)
    around = decode.around_context
    with monkeypatch.context() as patch:
        # Of a token whose attention is recorded the CPU tells what it has chosen.
        patch.setattr(decode, "around_context", lambda *args: by_cpu.append(args[2]) or around(*args))
        for layer in cache.layers:
            layer.record = AttentionRecord(np.array([0, 161]))
        told(llama, cache, tokens[:, 160:])
    eject(llama)
    cache = estimating(llama, **WAYS[way])
    told(llama, cache, tokens, prompt=160)
    for layer, chosen in zip(cache.layers, by_cpu, strict=True):
        for ids, of_head in zip(layer.resident._slots.ids[0].cpu(), chosen, strict=True):
            # No token was in a slot before.
            assert sorted(ids[ids >= 0].tolist()) == of_head.nonzero().flatten().tolist()
            assert of_head.any()


@pytest.mark.parametrize("model_type", with_slow(["gpt_oss", "gemma2"], slow=["gemma2"]))
def test_sinks_and_soft_capping_count_as_with_the_cpu(gpu, model_type):
    whole = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "head_dim": 32}
    model, found = model_on(torch.device("cuda", 0), tiny_model(model_type, **whole)), {}
    for attend_on in ("cpu", "gpu"):
        cache = estimating(model, attend_on, max_seq_len=300)
        found[attend_on] = torch.cat(told(model, cache, random_tokens(168), prompt=160))
        eject(model)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    del cache
    gc.collect()


def test_a_sequence_grows_out_of_its_window(llama):
    found = {}
    for attend_on in ("cpu", "gpu"):
        # The first block enters the Context, which is empty before, after some tokens; the last one is incomplete.
        cache = estimating(llama, attend_on, max_seq_len=61)
        found[attend_on] = torch.cat(told(llama, cache, random_tokens(60), prompt=36))
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["adaptive", "adaptive_lean"])
def test_a_context_that_is_covered_has_full_attention(llama, recipe):
    tokens = random_tokens(95)
    expected = told(llama, DynamicCache(config=llama.config), tokens, prompt=85)
    cache = estimating(llama, recipe=recipe, max_dense_blocks=ALL, block_size=32, sink_tokens=32)
    found = told(llama, cache, tokens, prompt=85)
    assert cache.statistics["estimated_share"] == pytest.approx([1.0] * LAYERS)
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_what_lies_on_the_gpu_is_planned(llama):
    lean = {"recipe": "adaptive_lean", "block_size": 32, "sink_tokens": 32}
    for settings in ({}, lean, {"kv_type": "Q8_0", "key_offset": "block_mean"}, {"kv_type": "Q4_0"}):
        cache = estimating(llama, **settings)
        told(llama, cache, random_tokens(81), prompt=80)
        planned = Footprint.of(llama.hetero_kv_injection).memory(400, 1).sizes
        assert planned[RESIDENT] == sum(bytes_on_gpu(cache))
        del cache
        eject(llama)


def test_packed_tokens_cross_the_bus_as_they_are_stored(llama):
    cache = estimating(llama, key_type="Q4_0", value_type="Q4_0")
    told(llama, cache, random_tokens(161), prompt=160)
    # No token is in a slot before; two kv heads attend to so many blocks each, in tokens of 18 bytes a key and a value.
    attended, read = (cache.statistics[name] for name in ("attended_blocks", "dram_bytes_read"))
    assert read == pytest.approx([blocks * 16 * 2 * (18 + 18) for blocks in attended])
    assert all(read)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings"), [("adaptive", {}), ("adaptive_lean", {}), ("adaptive", {"kv_type": "Q4_0"})]
)
def test_a_models_tokens_by_the_interpreter_are_those_by_definition(recipe, settings):
    found, sizes = {}, {"max_seq_len": 200, "block_size": 32, "sink_tokens": 32, "top_k_blocks": 2}
    for by_interpreter in (False, True):
        with simulated_cuda(interpret=by_interpreter):
            model = llama_on_gpu(head_dim=32)
            cache = estimating(model, recipe=recipe, **sizes, **settings)
            found[by_interpreter] = torch.cat(told(model, cache, random_tokens(152), prompt=150))
            del cache
            gc.collect()
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
