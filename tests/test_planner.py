"""The memory of a model's context."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.planning.footprint import _most
from hetero_kv.planning.plan import (
    Footprint,
    Plan,
)
from hetero_kv.rules.injecting import inject
from tests.support.planned_models import INTERNLM_7B, LLAMA_8B, LLAMA_70B, K, llama_plan, without_weights
from tests.support.slow_variants import with_few
from tests.support.tiny_models import ARCHITECTURES, tiny_model


@pytest.mark.parametrize(
    ("thousands", "article", "last_digit"),
    with_few(
        [(4, 0.5, 0.1), (32, 4.29, 0.01), (64, 8.58, 0.01), (128, 17.1, 0.1), (512, 68.7, 0.1), (1024, 137.4, 0.1)],
        quick=[(4, 0.5, 0.1), (1024, 137.4, 0.1)],
    ),
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


@pytest.mark.parametrize(
    "model_type", with_few(ARCHITECTURES, ("llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"))
)
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
@pytest.mark.parametrize("gigabytes", with_few([17, 20, 24, 48], quick=[20]))
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


@pytest.mark.parametrize("where", with_few(["auto", "gpu", "dram"], ("auto",)))
def test_a_longer_context_never_takes_less_of_a_gpu(where):
    footprint = llama_plan(on_gpu=True, hidden_device=where, chunk_size=K).footprint
    sizes = [footprint.memory(tokens).compute for tokens in range(K // 2, 4 * K, 64)]
    assert where == "dram" or sizes == sorted(sizes)
    assert footprint.memory(64 * K).hidden < 0.2e9 or where == "gpu"


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


def test_of_a_setting_that_each_layer_has_for_itself_the_largest_counts():
    def most(value):
        return _most(SimpleNamespace(num_experts_per_tok=value), "num_experts_per_tok")

    assert (most(2), most([2, 8, 4]), most(None)) == (2, 8, 0)
