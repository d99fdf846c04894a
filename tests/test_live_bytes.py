"""What a run holds on a GPU at any moment, against what is planned for it."""

from __future__ import annotations

import gc

import pytest
import torch
from devices import model_on, simulated_cuda
from small_recipes import injected, small_recipe
from tiny_models import tiny_model

from hetero_kv.planning.footprint import Footprint

HALF, SINGLE = torch.bfloat16, torch.float32
#: Architecture, recipe, number type, tokens, rows, where hidden states lie.
RUNS = [
    ("llama", "dense", HALF, 60, 2, "auto"),
    ("llama", "dense", HALF, 1000, 1, "gpu"),
    ("llama", "quest", HALF, 1000, 2, "auto"),
    ("llama", "ktransformers", HALF, 1000, 1, "auto"),
    ("llama", "dense", SINGLE, 1000, 1, "auto"),
    ("llama", "shadowkv", HALF, 1000, 1, "auto"),
    ("llama", "h2o", HALF, 1000, 1, "auto"),
    ("llama", "streaming_llm", HALF, 1000, 1, "auto"),
    ("gemma2", "dense", SINGLE, 1000, 1, "auto"),
    ("deepseek_v3", "dense", SINGLE, 200, 1, "auto"),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("architecture", "recipe", "dtype", "tokens", "rows", "where"), RUNS)
def test_no_more_lives_on_a_gpu_than_was_planned(architecture, recipe, dtype, tokens, rows, where):
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model(architecture).to(dtype))
        cache = injected(model, small_recipe(recipe, max_seq_len=tokens + 8, hidden_device=where))
        planned = Footprint.of(model.hetero_kv_injection).memory(tokens, rows)
        ids = torch.randint(2, 97, (rows, tokens), generator=torch.Generator().manual_seed(0)).to("cuda")
        before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
            model(ids[:, :1], past_key_values=cache)
        live = gpu.memory.peak[0] - before
        assert planned.compute / 10 < live <= planned.compute
        del cache
        gc.collect()
