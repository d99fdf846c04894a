"""Hidden states of long prompts in DRAM: the same answers in less GPU memory."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, eject
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.gpu_ops import page_locked
from tests.support.devices import model_on, simulated_cuda
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

CHUNK, LAYERS = 64, 2


def ids(rows=1, tokens=180, seed=0):
    return torch.randint(2, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def answers(model, where, prompts, recipe="dense", **call):
    """Logits of prompts, a decoded token behind each, with the hidden states `where`."""
    cache = injected(model, small_recipe(recipe, hidden_device=where, chunk_size=CHUNK))
    try:
        passed = [tokens for prompt in prompts for tokens in (prompt, prompt[:, :1])]
        return [model(tokens.to("cuda"), past_key_values=cache, **call).logits.cpu() for tokens in passed]
    finally:
        eject(model)


@pytest.mark.cuda
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_answers_are_the_same_wherever_hidden_states_lie(architecture):
    prompts = [ids(tokens=200), ids(tokens=150, seed=1)]
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model(architecture))
        expected = answers(model, "gpu", prompts)
        gpu.record.clear()
        actual = answers(model, "dram", prompts)
        for mine, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        # The layers and the final norm: every chunk comes and goes.
        assert sum(copy.line.startswith("hetero_kv/gpu_ops/chunk_stream") for copy in gpu.record.copies) >= 2 * 4 * (
            4 + 3
        )


@pytest.mark.cuda
@pytest.mark.parametrize("call", with_slow({"all": {}, "the last two": {"logits_to_keep": 2}}, slow=["all"]))
def test_batches_and_logits_to_keep_work_with_hidden_states_in_dram(call):
    prompts = [ids(rows=3)]
    with simulated_cuda():
        model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=LAYERS))
        expected, actual = (answers(model, where, prompts, **call)[0] for where in ("gpu", "auto"))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_nothing_that_hidden_states_are_copied_through_is_pageable(monkeypatch):
    # As if the states were gigabytes, which torch's own allocator would round up.
    monkeypatch.setattr(page_locked, "_LARGEST_OF_TORCH", 50_000)
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=LAYERS))
        answers(model, "dram", [ids(tokens=300)], logits_to_keep=1)
        copies = [copy for copy in gpu.record.copies if "chunk_stream" in copy.line]
        assert len(copies) > 30
        assert all(copy.is_pinned and not copy.is_blocking for copy in copies)


@pytest.mark.cuda
# Methods that note rotations have the tables on the GPU.
@pytest.mark.parametrize("recipe", ["dense", pytest.param("self_extend", marks=pytest.mark.slow)])
@torch.no_grad()
def test_nothing_of_a_prompt_is_copied_pageable(recipe):
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=LAYERS))
        first = injected(model, small_recipe(recipe, hidden_device="dram", chunk_size=CHUNK))
        prompt = ids(rows=2, tokens=150).to("cuda")
        # How a module rotates is tried before its first prompt.
        model(prompt, past_key_values=first, logits_to_keep=1)
        places = torch.arange(150)[None].repeat(2, 1).to("cuda")
        second = HeteroCache(model)
        gpu.record.clear()
        model(prompt, position_ids=places, past_key_values=second, logits_to_keep=1)
        # Of three chunks what was embedded; to and from the layers and the norm.
        assert sum("chunk_stream" in copy.line for copy in gpu.record.copies) == 3 + 2 * 3 * (LAYERS + 1)
        assert gpu.record.pageable == []
        frequencies = model.model.rotary_emb.inv_freq
        assert frequencies.is_cuda


@pytest.mark.cuda
def test_a_long_prompt_takes_less_of_the_gpu_than_its_hidden_states():
    peaks = {}
    for where in ("gpu", "auto"):
        with simulated_cuda() as gpu:
            model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=LAYERS))
            cache = injected(model, small_recipe("dense", hidden_device=where, chunk_size=48))
            before = gpu.memory.live[0]
            with torch.no_grad():
                model(ids(tokens=600).to("cuda"), past_key_values=cache, logits_to_keep=1)
            peaks[where] = gpu.memory.peak[0] - before
    hidden = 600 * 64 * 4
    assert peaks["auto"] < peaks["gpu"] - 1.5 * hidden


@pytest.mark.cuda
def test_an_interrupted_prompt_leaves_no_copy_under_way():
    with simulated_cuda():
        model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=LAYERS))
        expected = answers(model, "gpu", [ids()])
        cache = injected(model, small_recipe("dense", hidden_device="dram", chunk_size=CHUNK))
        layer = model.model.layers[1].wrapped
        prompt = ids().to("cuda")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer.mlp, "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model(prompt, past_key_values=cache)
        with torch.no_grad():
            again = model(ids().to("cuda"), past_key_values=cache).logits.cpu()
        torch.testing.assert_close(again, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_parts_that_do_not_run_in_chunks_are_refused_by_name_or_keep_the_states_on_the_gpu():
    with simulated_cuda():
        model = model_on(torch.device("cuda"), tiny_model("llama", num_hidden_layers=LAYERS))
        model.model.adapter = torch.nn.Linear(4, 4)
        with pytest.raises(UnsupportedModelError, match=r"adapter \(Linear\).*set hidden_device to gpu"):
            answers(model, "dram", [ids()])
        expected, actual = (answers(model, where, [ids()])[0] for where in ("gpu", "auto"))
        assert torch.equal(actual, expected)
