"""With `attend_on: gpu`: launches, copies, waits and bytes of a token."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.planning.footprint import Footprint
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.sampling import SamplingParams
from tests.operators.resident_models import ALL, BLOCK, LAYERS, injected, llama_on_gpu, random_tokens, rules, told
from tests.support.devices import model_on, simulated_cuda
from tests.support.simulated_cuda import Copy, Launch
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


@torch.no_grad()
def recorded(gpu, model, cache, tokens):
    """What decoding these tokens launches, copies and waits for, each alone, behind those that capture."""
    ids = tokens.to("cuda").split(1, dim=1)
    found = []
    for token in ids:
        gpu.record.clear()
        model.model(token, past_key_values=cache)
        found.append(list(gpu.record.everything))
    return found


def test_a_token_is_one_graph_and_the_host_waits_once(gpu, llama):
    cache = injected(llama, cuda_graphs="on")
    told(llama, cache, random_tokens(66), prompt=60)
    recorded(gpu, llama, cache, random_tokens(4, seed=1))
    for everything in recorded(gpu, llama, cache, random_tokens(BLOCK, seed=2)):
        launches = [each.name for each in everything if isinstance(each, Launch)]
        copies = [each for each in everything if isinstance(each, Copy)]
        assert launches.count("graph") == 1
        # The token's id and position, and a copy of the output.
        assert len(launches) <= 5
        assert len(everything) - len(launches) - len(copies) == 1
        assert all(copy.is_pinned and not copy.is_blocking for copy in copies)
        # For the layer with all tokens and for the other where the token is, and its keys and values. The table and a
        # block's representatives, where one enters the Context.
        assert len(copies) in (4, 6)


def test_a_greedy_answer_takes_two_launches_and_one_wait_for_a_token(gpu, llama):
    prompt = random_tokens(60)[0].tolist()
    found = {}
    for attend_on in ("cpu", "gpu"):
        forward, cache = ModelForward(llama), injected(llama, attend_on, cuda_graphs="on")
        sampler = Sampler(SamplingParams(temperature=0.0), prompt, 97)
        with AnswerTokens(forward, cache, sampler, prompt, forward.prompt(cache, prompt), limit=40) as answer:
            found[attend_on] = [next(answer).token for _ in range(8)]
            for _ in range(3 if attend_on == "gpu" else 0):
                gpu.record.clear()
                next(answer)
                # The token's id is copied to where the graph reads it.
                assert [each.name for each in gpu.record.launches] == ["copy_", "graph"]
                assert len(gpu.record.waits) == 1
                assert not gpu.record.pageable
        eject(llama)
    assert found["gpu"] == found["cpu"]


@pytest.mark.parametrize("recipe", ["adaptive", "adaptive_lean"])
def test_estimates_take_two_launches_and_one_wait_for_a_token(gpu, recipe):
    model, prompt = llama_on_gpu(head_dim=32), random_tokens(120)[0].tolist()
    sizes = {"block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "max_dense_blocks": 0, "min_blocks": 1}
    found = {}
    for attend_on in ("cpu", "gpu"):
        cache = injected(model, attend_on, recipe, cuda_graphs="on", **sizes)
        forward, sampler = ModelForward(model), Sampler(SamplingParams(temperature=0.0), prompt, 97)
        with AnswerTokens(forward, cache, sampler, prompt, forward.prompt(cache, prompt), limit=40) as answer:
            found[attend_on] = [next(answer).token for _ in range(8)]
            for _ in range(3 if attend_on == "gpu" else 0):
                gpu.record.clear()
                next(answer)
                assert [each.name for each in gpu.record.launches] == ["copy_", "graph"]
                assert len(gpu.record.waits) == 1
                assert not gpu.record.pageable
        eject(model)
    assert found["gpu"] == found["cpu"]
    del cache, forward, answer
    gc.collect()


def test_representatives_of_a_first_prompt_stay_on_the_gpu(gpu, llama):
    cache = injected(llama)
    told(llama, cache, random_tokens(80), prompt=80)
    # A block enters the Context with the next token, but no other.
    gpu.record.clear()
    told(llama, cache, random_tokens(1))
    of_block = 2 * 2 * 16 * 4
    sizes = [copy.nbytes for copy in gpu.record.copies if copy.to_device and "block_index.py" in copy.line]
    assert sizes in ([], [of_block])
    assert cache.layers[1].context_blocks > 3


def test_what_crosses_the_bus_is_counted_and_bounded(gpu, llama):
    cache = injected(llama, top_k_blocks=2)
    told(llama, cache, random_tokens(90), prompt=80)
    of_block = 2 * BLOCK * 16 * 2 * 4
    read = cache.statistics["dram_bytes_read"]
    # The first layer has all tokens; no other reads more than it attends to, and some of it stays.
    assert read[0] == 0
    assert all(0 < each < 2 * of_block for each in read[1:])
    eject(llama)
    covering = injected(llama, top_k_blocks=ALL)
    told(llama, covering, random_tokens(81), prompt=80)
    blocks = covering.layers[1].context_blocks
    assert covering.statistics["dram_bytes_read"][1:] == [blocks * of_block] * (LAYERS - 1)
    told(llama, covering, random_tokens(1))
    assert covering.statistics["dram_bytes_read"][1:] == [blocks * of_block / 2] * (LAYERS - 1)


@pytest.mark.slow
def test_more_sequences_than_are_captured_are_not_captured_again_and_again(llama, captures):
    first = injected(llama, cuda_graphs="on")
    told(llama, first, random_tokens(64), prompt=60)
    caches = [first, *(first.fork() for _ in range(5))]
    for turn in range(4):
        for cache in caches:
            told(llama, cache, random_tokens(1, seed=turn))
    seen = len(captures)
    for turn in range(4):
        for cache in caches:
            told(llama, cache, random_tokens(1, seed=turn))
    assert len(captures) == seen


@pytest.mark.slow
def test_a_graph_of_a_cache_that_is_gone_serves_no_other(llama):
    tokens = [random_tokens(66, seed=seed) for seed in range(3)]
    inject(llama, rules("cpu"))
    expected = [torch.cat(told(llama, HeteroCache(llama), each, prompt=60)) for each in tokens]
    eject(llama)
    inject(llama, rules(cuda_graphs="on"))
    for each, wanted in zip(tokens, expected, strict=True):
        cache = HeteroCache(llama)
        torch.testing.assert_close(torch.cat(told(llama, cache, each, prompt=60)), wanted, rtol=1e-4, atol=1e-4)
        del cache
        gc.collect()


@pytest.mark.parametrize(
    ("recipe", "tokens"), with_slow([("quest", 300), ("quest", 60), ("adaptive", 300)], slow=[("quest", 60)])
)
def test_no_more_lives_on_the_gpu_than_was_planned(recipe, tokens):
    sizes = {"block_size": 16, "max_dense_blocks": 2} if recipe == "adaptive" else {}
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama").to(torch.bfloat16))
        inject(model, rules(recipe=recipe, max_seq_len=tokens + 8, **sizes))
        cache = HeteroCache(model)
        planned = Footprint.of(model.hetero_kv_injection).memory(tokens, 1)
        before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        told(model, cache, random_tokens(tokens + 1), prompt=tokens)
        assert gpu.memory.peak[0] - before <= planned.compute
        del cache
        gc.collect()
