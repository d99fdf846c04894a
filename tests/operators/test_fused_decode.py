"""A fused decode layer equals the layer, and is not used where it would differ."""

from __future__ import annotations

import itertools

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.llama_layer import largest_difference, update_difference
from hetero_kv.cpu_ops.fused_decode_layer import gate_region
from hetero_kv.cpu_ops.gates import GELU_TANH
from tests.support.slow_variants import with_few, with_slow
from tests.support.tiny_models import tiny_model

SETTINGS = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0"}
PROMPT = torch.arange(2, 42)[None, :]
# More tokens than are multiplied with codes.
LONG = (torch.arange(110) % 90 + 2)[None, :]


def layers(model):
    return [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]


def decoded(model, tokens=6, rows=1, prompt=PROMPT):
    """Logits of some tokens behind a prompt."""
    cache = HeteroCache(model, 256)
    model(prompt.repeat(rows, 1), past_key_values=cache)
    steps = [torch.full((rows, 1), 3 + step) + torch.arange(rows)[:, None] for step in range(tokens)]
    return torch.cat([model(step, past_key_values=cache).logits for step in steps], dim=1)


def without_native_way(model):
    for layer in layers(model):
        layer._native = None


def relative(mine, expected):
    return float((mine - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("architecture", "rows"),
    with_slow(
        list(itertools.product(["llama", "qwen2", "qwen3", "mistral", "gemma2", "granite"], [1, 3])),
        slow=[("llama", 3), ("qwen2", 1), ("qwen3", 3), ("mistral", 1), ("mistral", 3), ("gemma2", 1), ("granite", 3)],
    ),
)
def test_tokens_are_the_same_the_native_way(architecture, rows):
    model = tiny_model(architecture)
    inject(model, "quest", command_line=SETTINGS)
    native = decoded(model, rows=rows, prompt=LONG)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))
    without_native_way(model)
    assert relative(native, decoded(model, rows=rows, prompt=LONG)) < 5e-3


@pytest.mark.parametrize("recipe", with_few(["tova", "shadowkv", "streaming_llm", "ktransformers"], 2))
def test_tokens_of_every_family_pass_the_native_way(recipe):
    model = tiny_model("qwen3")
    small = {"max_seq_len": 256, "weights": "q8_0"} | ({"rank": 16} if recipe == "shadowkv" else {})
    inject(model, recipe, command_line=small)
    native = decoded(model, prompt=LONG)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))
    without_native_way(model)
    assert relative(native, decoded(model, prompt=LONG)) < 5e-3


def test_tokens_are_as_exact_the_native_way_in_bfloat16():
    model, exact = tiny_model("qwen2").to(torch.bfloat16), tiny_model("qwen2").to(torch.bfloat16).float()
    for each in (model, exact):
        inject(each, "quest", command_line=SETTINGS)
    native, expected = decoded(model), decoded(exact)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))
    without_native_way(model)
    of_modules = relative(decoded(model), expected)
    assert of_modules < 0.1
    assert relative(native, expected) < 1.2 * of_modules


def test_a_layer_that_computes_something_else_is_noticed(caplog):
    """ERNIE has the parts of Llama and rotates other pairs; one of SmolLM3's layers does not rotate."""
    # The heads of other models here, and not of the dimension that its configuration gives.
    ernie = tiny_model("ernie4_5", head_dim=16)
    inject(ernie, "quest", command_line=SETTINGS)
    logits = decoded(ernie)
    assert [layer._native for layer in layers(ernie)] == [None] * 3
    assert caplog.text.count("the fused decode layer differs") == 1
    assert "model.layers.0.self_attn" in caplog.text
    without_native_way(ernie)
    assert torch.equal(logits, decoded(ernie))
    mixed = tiny_model("smollm3")
    inject(mixed, "quest", command_line=SETTINGS)
    decoded(mixed)
    assert [layer._native is None for layer in layers(mixed)] == [False, True, False]


@pytest.mark.parametrize("wrong", ["_bias", "_norm", "_epsilon", "_gate_up"])
def test_a_wrong_path_is_noticed(wrong, monkeypatch, caplog):
    made = FusedDecodeLayer.__init__

    def seeded(self, layer, operator, form, feed_forward, *beside):
        made(self, layer, operator, form, feed_forward, *beside)
        of = feed_forward if wrong == "_gate_up" else self
        value = getattr(of, wrong)
        setattr(of, wrong, {"_gate_up": gate_region(GELU_TANH), "_epsilon": value + 0.5}.get(wrong, value * 1.2 + 0.1))

    monkeypatch.setattr(FusedDecodeLayer, "__init__", seeded)
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    decoded(model, tokens=1)
    assert [layer._native for layer in layers(model)] == [None] * 3
    assert "it is not used, and" in caplog.text


# As its prompts do: test_fused_prefill.py.
@pytest.mark.parametrize("architecture", with_slow(["phi3", "gpt_neox", "olmo2"], slow=["gpt_neox"]))
def test_other_layers_take_the_general_way(architecture):
    model = tiny_model(architecture)
    inject(model, "quest", command_line=SETTINGS)
    decoded(model, tokens=1)
    assert [layer._native for layer in layers(model)] == [None] * 3


def test_a_layer_whose_weights_are_numbers_takes_the_general_way():
    model = tiny_model("llama")
    inject(model, "quest", command_line={name: value for name, value in SETTINGS.items() if name != "weights"})
    decoded(model, tokens=1)
    assert [layer._native for layer in layers(model)] == [None] * 3


def test_a_layer_that_adds_little_cannot_hide_a_difference():
    generator = torch.Generator().manual_seed(0)
    hidden, added = (torch.randn(2, 1, 64, generator=generator) for _ in range(2))
    theirs, mine = hidden + 1e-3 * added, hidden + 2e-3 * added
    assert largest_difference([mine], [theirs]) < 5e-3
    assert update_difference(mine, theirs, hidden) == pytest.approx(1, rel=0.01)
    # Rounding to bfloat16 is no difference.
    assert update_difference(theirs.bfloat16(), theirs.bfloat16() * (1 + 2**-8), hidden.bfloat16()) == 0
