"""After the last layer's attention a prompt computes only the tokens that the model's head needs."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import inject
from hetero_kv.adapter import chunked_decoder_layer
from hetero_kv.cpu_ops import fused_prefill_layer as kernels
from tests.support.slow_variants import combined
from tests.support.small_recipes import new_cache, small_recipe
from tests.support.tiny_models import tiny_model

EVERYTHING = {"max_seq_len": 256, "kv_type": "FP32", "chunk_size": 32}
PROMPT = (torch.arange(150) % 90 + 2).view(2, 75)


@pytest.fixture
def dense_model():
    """A model of three layers that attends to everything, whose short way has been tried."""
    model = tiny_model("qwen2")
    inject(model, "dense", command_line=EVERYTHING)
    last_logits(model, 1)
    return model


@pytest.fixture
def rows(monkeypatch):
    """How many rows passed the gate of a layer, chunk by chunk."""
    found, gate = [], kernels.gate_rows
    monkeypatch.setattr(kernels, "gate_rows", lambda own, *args: (found.append(len(own)), gate(own, *args))[1])
    return found


@pytest.fixture
def few_together(monkeypatch):
    """Of no more last tokens than the head wants is the last layer's output computed."""
    monkeypatch.setattr(chunked_decoder_layer, "_MIN_OUTPUT_TOKENS", 1)


@torch.no_grad()
def last_logits(model, count):
    """Logits of the last tokens of a turn, and of those of another one behind it."""
    cache = new_cache(model)
    turns = PROMPT[:, :60], PROMPT[:, 60:]
    parts = [model(turn, past_key_values=cache, logits_to_keep=count).logits for turn in turns]
    return torch.cat(parts, dim=1)


# Within a chunk of 32 tokens, and across two.
@pytest.mark.parametrize(
    ("recipe", "count"),
    combined(
        ["dense", "adaptive", "snapkv", "h2o", "cascade", "infinipot", "sirllm", "shadowkv", "infinigen"], [15, 1]
    ),
)
@pytest.mark.usefixtures("few_together")
def test_the_head_gets_its_rows_of_the_last_layer(recipe, count, rows):
    """Policies that score tokens by their logits get all logits."""
    model = tiny_model("qwen3")
    inject(model, small_recipe(recipe, chunk_size=32))
    expected = last_logits(model, 0)
    every = torch.cat([expected[:, 60 - count : 60], expected[:, 75 - count :]], dim=1)
    torch.testing.assert_close(last_logits(model, count), every, rtol=1e-5, atol=1e-6)
    assert rows


@pytest.mark.usefixtures("few_together")
def test_of_other_tokens_the_last_layers_output_is_not_computed(dense_model, rows):
    last_logits(dense_model, 1)
    # Two rows of 32 and 28 tokens, and of 15, through the first two layers; of the last one two tokens for each turn.
    assert rows == [64, 56] * 2 + [2] + [30] * 2 + [2]
    rows.clear()
    last_logits(dense_model, 0)
    assert rows == [64, 56] * 3 + [30] * 3


def test_of_some_tokens_more_it_is_computed_so_that_products_are_made_the_same_way(dense_model, rows, monkeypatch):
    monkeypatch.setattr(chunked_decoder_layer, "_MIN_OUTPUT_TOKENS", 40)
    last_logits(dense_model, 1)
    assert rows == [64, 56] * 2 + [24, 56] + [30] * 3


@pytest.mark.usefixtures("few_together")
@pytest.mark.parametrize("where", ["model", "model.norm", "model.layers.2"])
def test_hooks_after_the_layers_see_every_token(where, dense_model):
    heard = []

    def listen(_module, _inputs, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        heard.append(states.clone())

    handle = dense_model.get_submodule(where).register_forward_hook(listen)
    last_logits(dense_model, 0)
    expected = heard.copy()
    heard.clear()
    last_logits(dense_model, 1)
    handle.remove()
    for mine, each in zip(heard, expected, strict=True):
        torch.testing.assert_close(mine, each, rtol=1e-5, atol=1e-6)
