"""With `index_device: gpu` a GPU chooses the blocks that the CPU attends to."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.footprint import RESIDENT
from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval import indexed_decode
from hetero_kv.planning.footprint import Footprint
from tests.operators.resident_models import (
    ALL,
    BLOCK,
    CHOOSE_ON_CPU,
    injected,
    llama_on_gpu,
    random_tokens,
    rules,
    told,
)
from tests.operators.test_resident_on_cuda import WAYS, conversation
from tests.support.devices import simulated_cuda
from tests.support.launch_counts import counts_of
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

SCORED = {"index_device": "gpu"}


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


def scored(model, device="gpu", **settings):
    return injected(model, "cpu", engine={"index_device": device}, **settings)


CHOOSING = {name: way for name, way in WAYS.items() if name not in ("streaming", "dense")}


@pytest.mark.parametrize("graphs", with_slow(["on", "off"], slow=["off"]))
@pytest.mark.parametrize("way", with_slow(list(CHOOSING), slow=["shared", "largest", "infllm"]))
def test_a_conversation_and_its_bytes_are_those_of_the_cpus_choice(llama, way, graphs):
    found, told_of = {}, {}
    for device in ("cpu", "gpu"):
        cache = scored(llama, device, cuda_graphs=graphs, **CHOOSING[way])
        found[device] = conversation(llama, cache)
        layer = cache.layers[1]
        told_of[device] = layer.statistics["read_bytes"]
        representatives, (row,) = layer.pool.representatives, layer.group.sequences
        if device == "cpu":
            eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    # The CPU reads the same blocks, and no representatives.
    assert 0 < told_of["gpu"] < told_of["cpu"]
    assert told_of["cpu"] - told_of["gpu"] < row.length * representatives[0].nbytes
    del cache, layer, representatives, row


@pytest.mark.parametrize(
    "settings",
    [{"kv_type": "Q8_0"}, {"kv_type": "Q4_0"}, {"representative_storage": "Q8_0"}],
    ids=["q8_0", "q4_0", "representatives"],
)
def test_packed_blocks_are_chosen_as_by_the_cpu(gpu, settings):
    model, found = llama_on_gpu(head_dim=32), {}
    for device in ("cpu", "gpu"):
        cache = scored(model, device, block_size=16, dense_layer_num=0, top_k_blocks=2, **settings)
        found[device] = conversation(model, cache)
        eject(model)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    del cache
    gc.collect()


@torch.no_grad()
def test_a_covering_budget_is_full_attention(llama):
    tokens = random_tokens(75)
    expected = told(llama, DynamicCache(config=llama.config), tokens, prompt=60)
    found = told(llama, scored(llama, top_k_blocks=ALL), tokens, prompt=60)
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_the_cpu_attends_to_what_the_gpu_has_chosen(llama, monkeypatch):
    tokens = random_tokens(75)
    expected = torch.cat(told(llama, scored(llama), tokens, prompt=60))
    eject(llama)
    best = indexed_decode.best_blocks
    monkeypatch.setattr(indexed_decode, "best_blocks", lambda scores, *rest, **kwargs: best(-scores, *rest, **kwargs))
    found = torch.cat(told(llama, scored(llama), tokens, prompt=60))
    assert not torch.allclose(found, expected, rtol=1e-2)


def test_what_lies_on_the_gpu_is_planned(llama):
    for settings in ({}, {"recipe": "infllm"}, {"dense_layer_num": 0}):
        cache = scored(llama, **settings)
        told(llama, cache, random_tokens(61), prompt=60)
        planned = Footprint.of(llama.hetero_kv_injection).memory(400, 1).sizes
        on_gpu = sum(getattr(layer, "resident", None).nbytes for layer in cache.layers if hasattr(layer, "resident"))
        assert planned[RESIDENT] == on_gpu > 0
        del cache
        eject(llama)


def test_a_layer_waits_as_often_as_without():
    without, within = (counts_of(("quest",), index_device=device)["quest"] for device in ("auto", "gpu"))
    assert (within.waits, within.pageable) == (without.waits, without.pageable)
    # Two of three layers choose: scores, the choice, and the list into what is sent. The list takes no copy of its own;
    # a block's representatives take one, when it enters the Context.
    assert within.launches - without.launches == pytest.approx(3 * 2 / 3)
    assert within.pinned - without.pinned == pytest.approx(2 / 3 / BLOCK)


@pytest.mark.parametrize(
    ("recipe", "kwargs", "message"),
    [
        ("adaptive", {"block_size": 16}, "estimated attention masses"),
        *CHOOSE_ON_CPU,
    ],
)
def test_what_only_the_cpu_chooses_is_refused_by_name(recipe, kwargs, message):
    with pytest.raises(HeteroKVError, match=f"index_device is gpu, but .*{message}.*; set index_device to auto"):
        inject(tiny_model("llama"), rules("cpu", recipe, engine=SCORED, **kwargs))


@pytest.mark.parametrize(("recipe", "kwargs"), [("dense", {}), ("streaming", {}), ("shadowkv", {}), ("h2o", {})])
def test_rules_without_a_choice_of_blocks_are_refused(recipe, kwargs):
    with pytest.raises(
        ConfigError, match=r"index_device is gpu, but under .* no layer chooses blocks that a GPU scores"
    ):
        inject(tiny_model("llama"), rules("cpu", recipe, engine=SCORED, **kwargs))


def test_a_gpu_that_attends_also_chooses():
    inject(tiny_model("llama"), rules("gpu", engine=SCORED))
    with pytest.raises(ConfigError, match="index_device is cpu, but attend_on is gpu"):
        inject(tiny_model("llama"), rules("gpu", engine={"index_device": "cpu"}))


def test_a_model_on_a_cpu_is_refused_by_name():
    model = tiny_model("llama")
    cache = scored(model)
    with torch.no_grad():
        model(random_tokens(60), past_key_values=cache)
        with pytest.raises(HeteroKVError, match="index_device is gpu, but the model computes on the CPU; set index_d"):
            model(random_tokens(1), past_key_values=cache)


def test_kernels_that_are_not_tritons_are_refused_by_name(llama):
    inject(llama, rules("cpu", engine={**SCORED, "attention_backend": "torch"}))
    with pytest.raises(HeteroKVError, match="index_device is gpu, but Triton's kernels do not run here"):
        told(llama, HeteroCache(llama), random_tokens(61), prompt=60)


@pytest.mark.slow
def test_a_models_tokens_by_the_interpreter_are_those_by_definition():
    found = {}
    for by_interpreter in (False, True):
        with simulated_cuda(interpret=by_interpreter):
            model = llama_on_gpu(head_dim=32)
            cache = scored(model, max_seq_len=120, block_size=16, top_k_blocks=2)
            found[by_interpreter] = torch.cat(told(model, cache, random_tokens(112), prompt=110))
            del cache
            gc.collect()
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
