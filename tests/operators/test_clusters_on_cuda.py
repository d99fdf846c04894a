"""With `attend_on: gpu` a GPU chooses clusters, and attends to their tokens, as the CPU does (`retroinfer`)."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter.footprint import RESIDENT
from hetero_kv.families.retrieval.footprint import WINDOWS
from hetero_kv.families.token_retrieval import clustered_context
from hetero_kv.planning.footprint import Footprint
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.sampling import SamplingParams
from tests.operators.resident_models import LAYERS, bytes_on_gpu, clusters, llama_on_gpu, random_tokens, told
from tests.operators.test_resident_on_cuda import conversation
from tests.support.devices import model_on, simulated_cuda
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


def clustering(model, attend_on="gpu", **settings):
    inject(model, clusters(attend_on, **settings))
    return HeteroCache(model)


#: Shares of the clusters, and numbers; several clusters of a block, and blocks that are clusters; nothing estimated; a
#: layer that attends to everything; packed values; too few slots.
WAYS = {
    "shares": {},
    "numbers": {"exact_clusters": 3, "estimated_clusters": 5, "block_size": 4, "sink_tokens": 4},
    "exact alone": {"estimated_clusters": 0},
    "dense layer": {"dense_layer_num": 1},
    "values": {"value_type": "Q8_0", "head_dim": 32},
    "slots": {"slots_per_token": 0.5},
}


@pytest.mark.parametrize("graphs", with_slow(["on", "off"], slow=["off"]))
@pytest.mark.parametrize("way", with_slow(list(WAYS), slow=["exact alone", "values"]))
def test_a_conversation_and_its_statistics_are_those_with_the_cpu(gpu, way, graphs, monkeypatch):
    settings, found, told_of = dict(WAYS[way]), {}, {}
    model = llama_on_gpu(head_dim=settings.pop("head_dim", 16))
    few = settings.pop("slots_per_token", None)
    if few is not None:
        slots = clustered_context.ClusterChoice.slots
        monkeypatch.setattr(clustered_context.ClusterChoice, "slots", lambda self, capacity: int(few * slots(self, 9)))
    for attend_on in ("cpu", "gpu"):
        cache = clustering(model, attend_on, cuda_graphs=graphs, **settings)
        found[attend_on] = conversation(model, cache)
        told_of[attend_on] = cache.statistics
        eject(model)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    for name in ("estimated_share", "attended_tokens", "read_bytes"):
        expected = [each if each is None else pytest.approx(each, rel=1e-5) for each in told_of["cpu"][name]]
        assert told_of["gpu"][name] == expected, name
    read = told_of["gpu"]["dram_bytes_read"]
    assert [each > 0 for each in read] == [number >= settings.get("dense_layer_num", 0) for number in range(LAYERS)]
    del cache
    gc.collect()


def test_what_crosses_the_bus_is_counted(llama, monkeypatch):
    of_token = 2 * 2 * 16 * 4
    cache = clustering(llama, exact_clusters=1.0)
    told(llama, cache, random_tokens(81), prompt=80)
    tokens = cache.layers[1].context_blocks * 8
    assert cache.statistics["dram_bytes_read"] == [tokens * of_token] * LAYERS
    told(llama, cache, random_tokens(1))
    # All are in slots.
    assert cache.statistics["dram_bytes_read"] == [tokens * of_token / 2] * LAYERS
    eject(llama)
    monkeypatch.setattr(clustered_context.ClusterChoice, "slots", lambda *_: 5)
    cache = clustering(llama, exact_clusters=1.0)
    told(llama, cache, random_tokens(82), prompt=80)
    # Of each kv head all but five cross it again.
    assert cache.statistics["dram_bytes_read"] == [(tokens - 5 / 2) * of_token] * LAYERS


@pytest.mark.parametrize("model_type", with_slow(["gpt_oss", "gemma2"], slow=["gemma2"]))
def test_sinks_and_soft_capping_count_as_with_the_cpu(gpu, model_type):
    model, found = model_on(torch.device("cuda", 0), tiny_model(model_type)), {}
    for attend_on in ("cpu", "gpu"):
        found[attend_on] = torch.cat(told(model, clustering(model, attend_on), random_tokens(150), prompt=145))
        eject(model)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    gc.collect()


@torch.no_grad()
def test_a_covering_budget_is_full_attention(llama):
    tokens = random_tokens(75)
    expected = told(llama, DynamicCache(config=llama.config), tokens, prompt=60)
    found = told(llama, clustering(llama, exact_clusters=1.0), tokens, prompt=60)
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_a_saved_context_goes_on_as_with_the_cpu(llama, tmp_path):
    found = {}
    for attend_on in ("cpu", "gpu"):
        cache = clustering(llama, attend_on)
        told(llama, cache, random_tokens(130), prompt=120)
        cache.save(tmp_path / attend_on)
        eject(llama)
    for attend_on in ("cpu", "gpu"):
        inject(llama, clusters(attend_on))
        cache = HeteroCache.load(tmp_path / attend_on, llama)
        found[attend_on] = torch.cat(told(llama, cache, random_tokens(4, seed=1)))
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)


def test_a_token_takes_two_launches_and_one_wait(gpu, llama):
    prompt, found = random_tokens(120)[0].tolist(), {}
    for attend_on in ("cpu", "gpu"):
        cache = clustering(llama, attend_on, cuda_graphs="on")
        forward, sampler = ModelForward(llama), Sampler(SamplingParams(temperature=0.0), prompt, 97)
        with AnswerTokens(forward, cache, sampler, prompt, forward.prompt(cache, prompt), limit=40) as answer:
            found[attend_on] = [next(answer).token for _ in range(8)]
            for _ in range(3 if attend_on == "gpu" else 0):
                gpu.record.clear()
                next(answer)
                assert [each.name for each in gpu.record.launches] == ["copy_", "graph"]
                assert len(gpu.record.waits) == 1
                assert not gpu.record.pageable
        eject(llama)
    assert found["gpu"] == found["cpu"]
    del cache, forward, answer


def test_what_lies_on_the_gpu_is_planned(llama):
    for settings in ({}, {"block_size": 4, "sink_tokens": 4, "exact_clusters": 3}, {"dense_layer_num": 1}):
        cache = clustering(llama, **settings)
        told(llama, cache, random_tokens(81), prompt=80)
        planned = Footprint.of(llama.hetero_kv_injection).memory(400, 1).sizes
        # A layer that attends to everything has it in its window.
        windows = sum(layer.window.nbytes for layer in cache.layers)
        assert planned[RESIDENT] + planned[WINDOWS] == sum(bytes_on_gpu(cache)) + windows
        del cache
        eject(llama)


def test_no_more_lives_on_the_gpu_than_was_planned():
    tokens = 300
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama").to(torch.bfloat16))
        inject(model, clusters(max_seq_len=tokens + 8))
        cache = HeteroCache(model)
        planned = Footprint.of(model.hetero_kv_injection).memory(tokens, 1)
        before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        told(model, cache, random_tokens(tokens + 1), prompt=tokens)
        assert gpu.memory.peak[0] - before <= planned.compute
        del cache
        gc.collect()


@pytest.mark.slow
def test_a_models_tokens_by_the_interpreter_are_those_by_definition():
    found = {}
    for by_interpreter in (False, True):
        with simulated_cuda(interpret=by_interpreter):
            model = llama_on_gpu()
            found[by_interpreter] = torch.cat(told(model, clustering(model), random_tokens(92), prompt=90))
            gc.collect()
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
