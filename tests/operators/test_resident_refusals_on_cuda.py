"""With `attend_on: gpu`: what is refused by name."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, inject
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.gpu_ops import mapped_memory
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import LogitsError, Sampler
from hetero_kv.serving.sampling import SamplingParams
from tests.operators.resident_models import CHOOSE_ON_CPU, injected, llama_on_gpu, random_tokens, rules, told
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["twice", "behind"])
def test_saved_slots_that_are_no_blocks_of_the_context_are_refused(llama, tmp_path, wrong):
    cache = injected(llama)
    told(llama, cache, random_tokens(68), prompt=60)
    ids = cache.layers[1].resident._ids
    ids[..., -1] = ids[..., 0] if wrong == "twice" else 99
    cache.save(tmp_path / "context")
    with pytest.raises(DamagedContextError, match="blocks in slots are not distinct blocks of the Context"):
        HeteroCache.load(tmp_path / "context", llama)


def test_a_greedy_answer_of_numbers_that_are_none_is_refused(llama):
    forward, cache = ModelForward(llama), injected(llama, cuda_graphs="on")
    forward.prompt(cache, random_tokens(60)[0].tolist())
    sampler = Sampler(SamplingParams(temperature=0.0), (), 97)
    for token in range(2, 8):
        (found,) = forward.likeliest([cache], [token])
    assert isinstance(found, Likeliest)
    llama.lm_head.weight.mul_(float("nan"))
    (found,) = forward.likeliest([cache], [8])
    with pytest.raises(LogitsError, match="largest logit is nan"):
        sampler.choose(found)


#: Blocks of which there are coarse keys, from which single tokens are chosen.
COARSE = {"block_size": 16}


@pytest.mark.parametrize(
    ("recipe", "kwargs", "message"),
    [
        ("adaptive", {}, "keys in FP32 in blocks of 8 have no coarse copies"),
        ("adaptive", {**COARSE, "attend_to": "blocks"}, "whole blocks are chosen by estimated attention masses"),
        ("adaptive", {**COARSE, "group_reduce": "max"}, "group_reduce is max"),
        ("adaptive", {**COARSE, "head_select_mode": "SHARED"}, "head_select_mode is SHARED"),
        ("adaptive", {**COARSE, "residual_attention": "drop"}, "residual_attention is drop"),
        ("adaptive", {**COARSE, "group_blocks": 4}, "group_blocks"),
        ("adaptive", {"block_size": 512}, "block_size is 512"),
        ("adaptive", {**COARSE, "top_k_blocks": 0, "min_blocks": 0}, "top_k_blocks is 0"),
        ("retroinfer", {"kv_type": "Q8_0", "block_size": 32}, "single tokens are attended to of keys in Q8_0"),
        ("retroinfer", {"key_offset": "block_mean"}, "key_offset"),
        ("retroinfer", {"engine": {"measure_recall": True}}, "measure_recall"),
        *CHOOSE_ON_CPU,
    ],
)
def test_what_only_the_cpu_does_is_refused_by_name(recipe, kwargs, message):
    model = tiny_model("llama")
    with pytest.raises(HeteroKVError, match=f"attend_on is gpu, but .*{message}.*; set attend_on to cpu"):
        inject(model, rules(recipe=recipe, **kwargs))


def test_a_model_on_a_cpu_is_refused_by_name():
    model = tiny_model("llama")
    cache = injected(model)
    with torch.no_grad():
        model(random_tokens(60), past_key_values=cache)
        with pytest.raises(HeteroKVError, match="attend_on is gpu, but the model computes on the CPU; set attend_on"):
            model(random_tokens(1), past_key_values=cache)


@pytest.mark.filterwarnings("ignore:CUDA could not page-lock:RuntimeWarning")
def test_dram_that_cannot_be_locked_is_refused_by_name(gpu, llama, monkeypatch):
    monkeypatch.setattr(mapped_memory.MappedMemory, "reach", lambda self, size: False)
    cache = injected(llama)
    with pytest.raises(HeteroKVError, match="attend_on is gpu, but CUDA does not page-lock the DRAM of the blocks"):
        told(llama, cache, random_tokens(61), prompt=60)
