"""Large models without weights, for tests of plans."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.planning.plan import (
    Footprint,
    Plan,
)
from hetero_kv.rules.injecting import inject

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


def footprint_of(layers, element=2, on_gpu=False, weights=0):
    shape = {"chunk_size": 512, "hidden_size": 64, "rotary_dim": 8, "heads": 4, "activations": 1000}
    return Footprint(
        tuple(layers), weights, element, **shape, on_gpu=on_gpu, hidden_device="gpu", keeps_tables=False, tiles=False
    )
