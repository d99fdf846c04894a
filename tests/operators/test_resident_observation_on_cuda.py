"""With `attend_on: gpu` keys receive attention that the CPU counts, by which blocks get representatives."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, eject
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.sampling import SamplingParams
from tests.operators.resident_models import LAYERS, injected, llama_on_gpu, random_tokens, told
from tests.support.devices import model_on
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


def with_sinks():
    """A tiny model with learned sinks, all of whose layers attend to everything."""
    whole = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    return model_on(torch.device("cuda", 0), tiny_model("gpt_oss", **whole))


def counted(cache):
    """Of each layer what keys have received, and the queries that are not added up yet."""
    found = []
    for layer in cache.layers:
        part = layer.saved()
        found += [part.tensors["accumulated"], part.tensors["queries"], part.tensors["lse"]]
    return found


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_keys_receive_what_they_receive_with_the_cpu(gpu, model_type, graphs):
    model, found = llama_on_gpu() if model_type == "llama" else with_sinks(), {}
    for attend_on in ("cpu", "gpu"):
        cache = injected(model, attend_on, "ktransformers", cuda_graphs=graphs)
        # Two blocks close, and three queries are pending behind them.
        told(model, cache, random_tokens(103), prompt=84)
        found[attend_on] = counted(cache)
        eject(model)
    assert len(found["gpu"]) == 3 * LAYERS
    assert found["cpu"][0].max() > 0.1
    for actual, expected in zip(found["gpu"], found["cpu"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    del cache
    gc.collect()


def test_a_saved_context_continues_as_if_nothing_had_happened(llama, tmp_path):
    cache, tokens = injected(llama, recipe="ktransformers"), random_tokens(90)
    told(llama, cache, tokens[:, :75], prompt=60)
    cache.save(tmp_path / "context")
    expected = torch.cat(told(llama, cache, tokens[:, 75:]))
    loaded = HeteroCache.load(tmp_path / "context", llama)
    assert torch.equal(torch.cat(told(llama, loaded, tokens[:, 75:])), expected)


def test_blocks_that_are_opened_again_are_represented_again(llama):
    found = {}
    for attend_on in ("cpu", "gpu"):
        cache = injected(llama, attend_on, "ktransformers")
        told(llama, cache, random_tokens(75), prompt=60)
        for layer in cache.groups[0].family_layers:
            layer.reopen()
        found[attend_on] = torch.cat(told(llama, cache, random_tokens(30, seed=1), prompt=20))
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)


def test_a_failed_tokens_query_is_forgotten(llama, monkeypatch):
    cache = injected(llama, recipe="ktransformers", cuda_graphs="on")
    told(llama, cache, random_tokens(75), prompt=60)
    before = counted(cache)
    with monkeypatch.context() as patch:
        stored = []

        def refuse(self, largest):
            stored.append(self)
            if len(stored) == LAYERS:
                raise HeteroKVError("on purpose")

        patch.setattr(RetrievalLayer, "require_storable", refuse)
        with pytest.raises(HeteroKVError, match="on purpose"):
            told(llama, cache, random_tokens(1, seed=9))
    for actual, expected in zip(counted(cache), before, strict=True):
        assert torch.equal(actual, expected)


def test_a_greedy_answer_takes_two_launches_and_one_wait_for_a_token(gpu, llama):
    prompt = random_tokens(60)[0].tolist()
    forward, cache = ModelForward(llama), injected(llama, recipe="ktransformers", cuda_graphs="on")
    sampler = Sampler(SamplingParams(temperature=0.0), prompt, 97)
    with AnswerTokens(forward, cache, sampler, prompt, forward.prompt(cache, prompt), limit=40) as answer:
        for _ in range(8):
            next(answer)
        # A block closes meanwhile.
        for _ in range(9):
            gpu.record.clear()
            next(answer)
            assert [each.name for each in gpu.record.launches] == ["copy_", "graph"]
            assert len(gpu.record.waits) == 1
            assert not gpu.record.pageable
