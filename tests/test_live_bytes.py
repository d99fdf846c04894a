"""A run's GPU memory never exceeds the plan."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.planning.footprint import Footprint
from hetero_kv.rules.injecting import inject
from tests.support.devices import model_on, simulated_cuda
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

HALF, SINGLE = torch.bfloat16, torch.float32
#: Architecture, recipe, number type, tokens, rows, where hidden states lie.
RUNS = [
    ("llama", "dense", HALF, 60, 2, "auto"),
    ("llama", "dense", HALF, 600, 1, "gpu"),
    ("llama", "quest", HALF, 600, 2, "auto"),
    ("llama", "ktransformers", HALF, 600, 1, "auto"),
    ("llama", "dense", SINGLE, 600, 1, "auto"),
    ("llama", "shadowkv", HALF, 600, 1, "auto"),
    ("llama", "h2o", HALF, 600, 1, "auto"),
    ("llama", "streaming_llm", HALF, 600, 1, "auto"),
    ("gemma2", "dense", SINGLE, 600, 1, "auto"),
    ("deepseek_v3", "dense", SINGLE, 200, 1, "auto"),
]
# What holds what others hold.
SELDOM = (
    ("llama", "quest", HALF),
    ("llama", "dense", SINGLE),
    # Its turns are below.
    ("llama", "shadowkv", HALF),
    ("llama", "streaming_llm", HALF),
    ("gemma2", "dense", SINGLE),
    # What its keys and values take is planned for every model: test_planned_bytes.py.
    ("deepseek_v3", "dense", SINGLE),
)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("architecture", "recipe", "dtype", "tokens", "rows", "where"),
    with_slow(RUNS, slow=[run for run in RUNS if run[:3] in SELDOM]),
)
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


@pytest.mark.cuda
@pytest.mark.parametrize("refactor_above", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_no_turn_of_shadowkv_takes_more_than_was_planned(refactor_above):
    tokens = 480
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=2).to(HALF))
        settings = {"rank": 32, "landmark_chunk_size": 4, "sparse_budget": 16, "outlier_chunks": 3, "local_chunks": 2}
        engine = {"max_seq_len": tokens + 64, "chunk_size": 64, "threads_num": 1, "hidden_device": "dram"}
        settings |= {"refactor_above": refactor_above, **engine}
        inject(model, "shadowkv", command_line=settings)
        cache = HeteroCache(model, forks=1)
        ids = torch.randint(2, 97, (1, tokens), generator=torch.Generator().manual_seed(0)).to("cuda")
        turns = ids.split([320, *[1] * 4, tokens - 324], dim=1)
        weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        footprint = Footprint.of(model.hetero_kv_injection)

        def peak(of, *parts):
            torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                for part in parts:
                    of(part)
            return gpu.memory.peak[0] - weights

        def turn(cache):
            return lambda part: model(part, past_key_values=cache, logits_to_keep=1)

        one, two = (footprint.memory(tokens, forks=forks).compute for forks in (0, 1))
        found = {"first": peak(turn(cache), *turns[:-1])}
        before = cache.snapshot()
        found["later"] = peak(turn(cache), turns[-1])
        cache.rollback(before)
        found["again"] = peak(turn(cache), turns[-1])
        cache.rollback(before)
        del before
        fork = cache.fork()
        forked = [peak(turn(each), turns[-1]) for each in (fork, cache)]
        assert max(found.values()) <= one
        assert max(forked) <= two
        del cache, fork
        gc.collect()
