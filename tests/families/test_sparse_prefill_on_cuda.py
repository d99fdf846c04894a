"""A sparse prefill on a GPU chooses what a CPU chooses, waits for nothing, and says where it cannot."""

from __future__ import annotations

import shutil

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.families.sparse_prefill import device_chunk, flexprefill, minference
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.device_chunk import DeviceChunk
from hetero_kv.families.sparse_prefill.device_sets import HeadPatterns, flexprefill_sets, measured_patterns
from hetero_kv.families.sparse_prefill.key_lists import runs_of
from hetero_kv.families.sparse_prefill.minference import Pattern
from hetero_kv.gpu_ops import attention_backend
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.planning.footprint import Footprint
from tests.families.sparse_prompts import logits
from tests.gpu_ops.test_key_sets import masks_of_runs
from tests.support.devices import model_on, simulated_cuda
from tests.support.slow_variants import combined
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

CUDA = torch.device("cuda", 0)
CHEAP = {"prefill_budget": 128, "error_budget": 1.0}
FEW = {"prefill_mass": 0.3, "prefill_min_budget": 64, "prefill_last": 30}


def chunk_of(past, n, softcap=None, sink=None, seed=0):
    """Two rows of four heads, of which two share keys; some keys are attended to by all, as in models."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, n, 16, generator=generator)
    k, v = (torch.randn(2, 2, past + n, 16, generator=generator) for _ in range(2))
    k[:, :, ::37] += 2 * q.mean(dim=(0, 1, 2))
    return Chunk(q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:], 0.3, softcap, sink)


def on_gpu(chunk):
    q, past_k, past_v, k, v = (each.to(CUDA) for each in (chunk.q, chunk.past_k, chunk.past_v, chunk.k, chunk.v))
    sink = None if chunk.sink is None else chunk.sink.to(CUDA)
    return Chunk(q, past_k, past_v, k, v, chunk.scale, chunk.softcap, sink)


def of_cpu(chunk, keys):
    """The sets that a CPU attends to, [rows, heads, query blocks, total] bool."""
    runs, starts = runs_of(keys, chunk.past, chunk.n)
    return masks_of_runs(runs, starts, chunk.total).view(*chunk.q.shape[:2], chunk.query_blocks, chunk.total)


SHAPES = [(700, 256), (640, 130), (0, 500), (330, 40)]


@pytest.mark.parametrize(("shape", "softcap", "matches"), combined(SHAPES, [None, 3.0], [0, 2]))
def test_patterns_choose_the_keys_that_a_cpu_chooses(gpu, shape, softcap, matches):
    past, n = shape
    chunk = chunk_of(past, n, softcap)
    patterns = [
        Pattern("vertical_slash", 30, 170), Pattern("block_sparse", 0, 192), Pattern("a_shape", 80, 100),
        Pattern("vertical_slash", 3, 5),
    ]  # fmt: skip
    expected = of_cpu(chunk, minference.keys_of(chunk, patterns, matches))
    device = DeviceChunk.of(on_gpu(chunk))
    sets = HeadPatterns.of(patterns, CUDA).sets(device, n, 0, matches)
    assert torch.equal(sets.seen().cpu(), expected)
    assert not expected.all()


@pytest.mark.parametrize(("past", "n"), SHAPES)
@pytest.mark.parametrize(("mass", "least"), [(0.5, 64), (0.8, 300), (1.0, 64)])
@pytest.mark.parametrize("near", [0.0, 0.1, 1.0])
def test_flexprefill_chooses_the_keys_that_a_cpu_chooses(gpu, monkeypatch, past, n, mass, least, near):
    """By lines alone, by what the divergence says, and by blocks alone."""
    monkeypatch.setattr(flexprefill, "NEAR", near)
    chunk = chunk_of(past, n)
    expected = of_cpu(chunk, flexprefill.keys_of(chunk, mass, least))
    found = flexprefill_sets(DeviceChunk.of(on_gpu(chunk)), n, mass, least).seen().cpu()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("whole", [0, 1, 80, 999])
@pytest.mark.parametrize("at_once", [1, 4 << 20], ids=["one kv head at a time", "all heads"])
def test_a_chunk_attends_as_on_a_cpu(gpu, monkeypatch, whole, at_once):
    monkeypatch.setattr(device_chunk, "_TOKENS_AT_ONCE", at_once)
    chunk = chunk_of(300, 150, sink=torch.tensor([-1.0, 0.0, 1.0, 3.0]))
    expected = chunk.attention(flexprefill.keys_of(chunk, 0.5, 64), whole)
    gpu.record.clear()
    found = DeviceChunk.of(on_gpu(chunk)).attention(lambda part, n, _: flexprefill_sets(part, n, 0.5, 64), whole)
    launched = [launch.name for launch in gpu.record.launches]
    assert launched.count("_attend_sets") == (0 if whole == 999 else 2 if at_once == 1 else 1)
    for each, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(each.cpu(), other, rtol=1e-5, atol=1e-5)
    # A query block's keys, the mean over blocks.
    torch.testing.assert_close(found[2].double().mean(dim=2).cpu(), torch.from_numpy(expected[2]))


def test_patterns_are_measured_as_on_a_cpu(gpu):
    chunk = chunk_of(900, 128)
    tensors = chunk.q, chunk.past_k, chunk.past_v, chunk.k, chunk.v
    exact = chunk_attention(*tensors, chunk.scale)[0]
    expected = minference.measured_patterns(chunk, exact, 512)
    # The search's queries begin before the chunk that ends the prompt.
    behind = chunk.last(50)
    device, exact = DeviceChunk.of(on_gpu(behind), chunk.q.to(CUDA)), exact.to(CUDA)
    gpu.record.clear()
    found = measured_patterns(device, exact, 512)
    assert len(gpu.record.waits) == 1
    for head, other in zip(found, expected, strict=True):
        assert [each.pattern for each in head] == [each.pattern for each in other]
        for each, another in zip(head, other, strict=True):
            assert each.error == pytest.approx(another.error, rel=1e-3, abs=1e-6)
            assert each.tokens == another.tokens


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        pytest.param("flexprefill", FEW, marks=pytest.mark.slow),
        ("flexprefill", {**FEW, "chunk_size": 150, "prefill_from": 130}),
        ("minference", {**CHEAP, "prefill_last": 0}),
        pytest.param("shadowkv_minference", {**CHEAP, "prefill_last": 40, "rank": 16}, marks=pytest.mark.slow),
    ],
    ids=["flexprefill", "flexprefill, odd chunks", "minference", "shadowkv_minference"],
)
def test_whole_models_prefill_as_on_a_cpu(qwen2, own_folder, monkeypatch, recipe, settings):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(minference, "_PRICED_LENGTH", 250)
    # The second prefill has patterns.
    expected, exact = logits(qwen2, recipe, ids, 2, **settings), logits(qwen2, "dense", ids)
    # The GPU searches anew.
    shutil.rmtree(own_folder, ignore_errors=True)
    with simulated_cuda() as gpu:
        model = model_on(CUDA, qwen2)
        found = logits(model, recipe, ids.to(CUDA), 2, **settings).cpu()
        assert "_attend_sets" in {launch.name for launch in gpu.record.launches}
        del model
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected, exact, atol=1e-2)


def conversation(model, recipe, ids, settings):
    """A prompt, two tokens, a turn of 250 and one of 48."""
    engine = {"chunk_size": 200, "max_seq_len": 1024, "threads_num": 1, "kv_type": "FP32", "prefill_from": 64}
    inject(model, recipe, command_line={name: value for name, value in {**engine, **FEW, **settings}.items() if value})
    try:
        cache = HeteroCache(model)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits.cpu() for part in ids.split([400, 1, 1, 250, 48], dim=1)]
    finally:
        eject(model)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("flexprefill", {}),
        ("quest", {"prefill": "flexprefill"}),
        ("sparq", {"prefill": "flexprefill"}),
        ("shadowkv", {"prefill": "flexprefill", "rank": 16}),
        ("h2o", {"prefill": "flexprefill", "budget": 300, "kv_type": None}),
    ],
    ids=["flexprefill", "quest", "sparq", "shadowkv", "h2o"],
)
def test_later_turns_are_as_sparse_as_on_a_cpu(qwen2, recipe, settings):
    ids = torch.randint(1, 97, (1, 700), generator=torch.Generator().manual_seed(1))
    expected = conversation(qwen2, recipe, ids, settings)
    with simulated_cuda() as gpu:
        model = model_on(CUDA, qwen2)
        found = conversation(model, recipe, ids.to(CUDA), settings)
        # Per layer two chunks of the prompt and one of the first turn, whose other one is all last tokens.
        assert [launch.name for launch in gpu.record.launches].count("_attend_sets") == 9
        del model
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "priced", "most"),
    [
        ("flexprefill", 16384, 98),
        pytest.param("minference", 16384, 55, marks=pytest.mark.slow),
        ("minference", 250, 63),
    ],
)
def test_a_prompt_waits_for_no_choice(qwen2, monkeypatch, recipe, priced, most):
    """Nothing more is waited for or pageable than in a dense prompt. most: launches beyond its, per layer and chunk.

    priced: tokens up to which no blocks are matched.
    """
    monkeypatch.setattr(minference, "_PRICED_LENGTH", priced)
    ids, counts = torch.arange(500)[None] % 90 + 2, {}
    few = {"prefill_mass": 0.3} if recipe == "flexprefill" else {"error_budget": 1.0, "prefill_budget": 256}
    with simulated_cuda() as gpu:
        model = model_on(CUDA, qwen2)
        for name, sparse in (("dense", {}), (recipe, {"prefill_from": 64, **few})):
            engine = {"chunk_size": 128, "max_seq_len": 1024, "threads_num": 1, "hidden_device": "gpu"}
            inject(model, name, command_line={**engine, **sparse})
            cache = HeteroCache(model)
            with torch.no_grad():
                # The first prompt finds patterns.
                model(ids.to(CUDA), past_key_values=cache)
                cache.reset()
                gpu.record.clear()
                model(ids.to(CUDA), past_key_values=cache)
            counts[name] = len(gpu.record.waits), len(gpu.record.launches), len(gpu.record.pageable)
            del cache
            eject(model)
        del model
    (waits, launches, pageable), (more_waits, more_launches, more_pageable) = counts["dense"], counts[recipe]
    assert (more_waits, more_pageable) == (waits, pageable)
    # Of three layers, and of four chunks.
    assert more_launches - launches <= 12 * most


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("runs_triton", lambda tensor: False, "Triton does not run there"),
        ("_LARGEST_HEAD", 8, "its kernels take heads of at most 8 numbers, not 16"),
    ],
    ids=["no Triton", "wide heads"],
)
def test_where_a_gpu_cannot_prompts_are_dense_and_it_is_said(qwen2, monkeypatch, caplog, attribute, value, why):
    ids = torch.randint(1, 97, (1, 150))
    monkeypatch.setattr(attention_backend, attribute, value)
    with simulated_cuda() as gpu:
        model = model_on(CUDA, qwen2)
        exact = logits(model, "dense", ids.to(CUDA))
        caplog.clear()
        assert torch.equal(logits(model, "flexprefill", ids.to(CUDA)).cpu(), exact.cpu())
        assert "_attend_sets" not in {launch.name for launch in gpu.record.launches}
        del model
    assert [record.getMessage() for record in caplog.records if "prefill" in record.getMessage()] == [
        f"prefill flexprefill: this prompt attends to all tokens, because {why}"
    ]


def test_torch_alone_attends_to_everything_and_it_is_said(qwen2, caplog):
    ids = torch.randint(1, 97, (1, 150))
    with simulated_cuda():
        model = model_on(CUDA, qwen2)
        found = logits(model, "flexprefill", ids.to(CUDA), attention_backend="torch").cpu()
        torch.testing.assert_close(found, logits(model, "dense", ids.to(CUDA)).cpu(), rtol=1e-4, atol=1e-4)
        del model
    assert "because attention_backend is torch, and its kernels are Triton's" in caplog.text


@pytest.mark.slow
def test_the_interpreters_kernels_prefill_a_model(qwen2):
    """Kernels, not their definitions, in a model's own shapes."""
    ids = torch.randint(1, 97, (1, 170), generator=torch.Generator().manual_seed(1))
    settings = {"prefill_mass": 0.3, "prefill_min_budget": 64, "prefill_last": 0, "chunk_size": 128}
    expected = logits(qwen2, "flexprefill", ids, **settings)
    with simulated_cuda(interpret=True):
        model = model_on(CUDA, qwen2)
        found = logits(model, "flexprefill", ids.to(CUDA), **settings).cpu()
        del model
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_learned_sinks_take_their_share_on_a_gpu():
    model = tiny_model("gpt_oss", max_position_embeddings=2048)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 6.0)
    ids = torch.randint(1, 97, (1, 250), generator=torch.Generator().manual_seed(1))
    expected = logits(model, "flexprefill", ids, **FEW)
    with simulated_cuda():
        copied = model_on(CUDA, model)
        found = logits(copied, "flexprefill", ids.to(CUDA), **FEW).cpu()
        del copied
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", ["flexprefill", "minference", "shadowkv", "h2o"])
def test_no_more_lives_on_a_gpu_than_was_planned(qwen2, recipe):
    """For minference, in the prompt that searches patterns by more queries than a chunk has."""
    tokens = 600
    with simulated_cuda() as gpu:
        model = model_on(CUDA, qwen2)
        prefill = recipe if recipe == "minference" else "flexprefill"
        settings = {"prefill": prefill, "prefill_from": 64, "chunk_size": 128, "max_seq_len": 608}
        extra = {"rank": 16} if recipe == "shadowkv" else {"budget": 100} if recipe == "h2o" else {}
        inject(model, recipe, command_line={**settings, **extra, "threads_num": 1, "hidden_device": "gpu"})
        cache = HeteroCache(model)
        planned = Footprint.of(model.hetero_kv_injection).memory(tokens, 1)
        ids = torch.randint(2, 97, (1, tokens), generator=torch.Generator().manual_seed(0)).to(CUDA)
        before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
        assert "_attend_sets" in {launch.name for launch in gpu.record.launches}
        assert gpu.memory.peak[0] - before <= planned.compute
        eject(model)
        del cache, model
