"""A decoded token's layer with a recurrent mixer is fused, and equals the layer and its state."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter import recurrent_prompt
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.fused_recurrent_layer import FusedRecurrentLayer
from hetero_kv.adapter.recurrent_form import DeltaNet, ShortConvolution
from hetero_kv.adapter.recurrent_prompt import DeltaNetPrompt
from hetero_kv.engine.recurrent_state import is_state, named_states
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model
from tests.support.unpacked_layers import unpack

SETTINGS = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0"}
# A code of 8 bits that is rounded otherwise, among 64 of a row.
ROUNDING = 3e-2
FUSED = with_slow(
    ["lfm2_moe", "qwen3_5_text", "qwen3_next", "lfm2", "bamba", "granitemoehybrid"], slow=["lfm2", "granitemoehybrid"]
)


def injected(architecture):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=SETTINGS)
    for module in model.modules():
        # Modules round the inputs of a packed gate to 8 bits, the fused layer does not.
        if hasattr(module, "shared_expert_gate"):
            unpack(module, "shared_expert_gate")
    return model


def layers(model):
    return [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]


def decoded(model, rows=1, tokens=4):
    """Logits of some tokens behind a prompt, and the states after them."""
    cache = HeteroCache(model, 256)
    model((torch.arange(2, 32)[None] % 90).repeat(rows, 1), past_key_values=cache)
    steps = [torch.full((rows, 1), 3 + step) + 7 * torch.arange(rows)[:, None] for step in range(tokens)]
    logits = torch.cat([model(step, past_key_values=cache).logits for step in steps], dim=1)
    return logits, [state for layer in cache.layers if is_state(layer) for state in named_states(layer).values()]


def relative(mine, expected):
    return float((mine - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("architecture", FUSED)
def test_a_token_passes_a_fused_recurrent_layer_as_its_modules(architecture, rows, monkeypatch):
    model = injected(architecture)
    logits, states = decoded(model, rows)
    kinds = [FusedRecurrentLayer if layer.is_recurrent else FusedDecodeLayer for layer in layers(model)]
    assert [type(layer._native) for layer in layers(model)] == kinds
    assert FusedRecurrentLayer in kinds
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_decode", lambda self: None)
    expected, their_states = decoded(model, rows)
    assert relative(logits, expected) < ROUNDING
    assert states
    for mine, theirs in zip(states, their_states, strict=True):
        assert relative(mine, theirs) < ROUNDING


def test_matrices_of_few_outputs_may_be_numbers(monkeypatch):
    model = injected("qwen3_5_text")
    for layer in layers(model):
        if layer.is_recurrent:
            unpack(layer.wrapped.linear_attn, "in_proj_b", "in_proj_a")
    logits, _ = decoded(model)
    assert any(isinstance(layer._native, FusedRecurrentLayer) for layer in layers(model))
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative(logits, decoded(model)[0]) < ROUNDING


def test_tokens_are_the_same_in_bfloat16(monkeypatch):
    model = tiny_model("lfm2").to(torch.bfloat16)
    inject(model, "dense", command_line=SETTINGS)
    logits, _ = decoded(model)
    assert any(isinstance(layer._native, FusedRecurrentLayer) for layer in layers(model))
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative(logits, decoded(model)[0]) < 0.1


@pytest.mark.parametrize(
    ("architecture", "kind", "wrong"),
    [
        ("qwen3_5_text", DeltaNet, "_decay"),
        ("qwen3_5_text", DeltaNet, "_time_bias"),
        ("qwen3_5_text", DeltaNet, "_weight"),
        ("lfm2_moe", ShortConvolution, "_weight"),
    ],
)
def test_a_wrong_step_is_noticed(architecture, kind, wrong, monkeypatch, caplog):
    made = kind.__init__

    def seeded(self, *arguments):
        made(self, *arguments)
        setattr(self, wrong, getattr(self, wrong) * 1.2 + 0.1)

    monkeypatch.setattr(kind, "__init__", seeded)
    model = injected(architecture)
    decoded(model, tokens=1)
    assert all(layer._native is None for layer in layers(model) if layer.is_recurrent)
    assert "the fused recurrent layer differs from the layer" in caplog.text


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3_5_text", "float32"), ("qwen3_next", "float32"),
                                                     ("qwen3_5_text", "bfloat16")])  # fmt: skip
def test_a_prompt_passes_a_delta_net_in_a_kernel_as_in_its_module(architecture, dtype, rows, monkeypatch):
    model = tiny_model(architecture).to(getattr(torch, dtype))
    # In two chunks, the second of which continues from the state; then a turn, and a token.
    inject(model, "dense", command_line=SETTINGS | {"chunk_size": 64})
    prompt = torch.arange(2, 110)[None].repeat(rows, 1) * torch.arange(1, rows + 1)[:, None] % 90
    kernels, compute = [], DeltaNetPrompt.__call__
    # The first chunk of one row passes in two halves. Products of fewer than 128 rows have activations of 8 bits, so
    # that halves of two rows would have others than the module.
    monkeypatch.setattr(recurrent_prompt, "_TOKENS_AT_ONCE", 48 if rows == 1 else 64)

    def counted(self, hidden_states, *arguments):
        kernels.append(hidden_states.shape[1])
        return compute(self, hidden_states, *arguments)

    def passed():
        cache = HeteroCache(model, 256)
        parts = prompt, prompt[:, :7], prompt[:, :1]
        logits = [model(part, past_key_values=cache).logits for part in parts]
        return torch.cat(logits, dim=1), [
            state for layer in cache.layers if is_state(layer) for state in named_states(layer).values()
        ]

    passed()
    monkeypatch.setattr(DeltaNetPrompt, "__call__", counted)
    logits, states = passed()
    recurrent = sum(layer.is_recurrent for layer in layers(model))
    assert sorted(kernels) == sorted([64, *([32, 32] if rows == 1 else []), 44, 7] * recurrent)
    assert all("forward" not in layer.attention.__dict__ for layer in layers(model) if layer.is_recurrent)
    monkeypatch.setattr(FusedRecurrentLayer, "mixer_forward", None)
    kernels.clear()
    expected, their_states = passed()
    assert not kernels
    # In bfloat16 each differs from float32 by 0.07: the module rounds more often.
    tolerance = 1e-3 if dtype == "float32" else 0.1
    assert relative(logits, expected) < tolerance
    for mine, theirs in zip(states, their_states, strict=True):
        assert relative(mine, theirs) < tolerance


@pytest.mark.parametrize("wrong", ["_weight", "_decay", "_time_bias"])
def test_a_wrong_kernel_for_prompts_is_noticed(wrong, monkeypatch, caplog):
    made = DeltaNetPrompt.__init__

    def seeded(self, *arguments):
        made(self, *arguments)
        setattr(self, wrong, getattr(self, wrong) * 1.2 + 0.1)

    monkeypatch.setattr(DeltaNetPrompt, "__init__", seeded)
    model = injected("qwen3_5_text")
    decoded(model, tokens=1)
    assert all(layer._native is None for layer in layers(model) if layer.is_recurrent)
    assert "the fused recurrent layer differs from the layer" in caplog.text


@torch.no_grad()
def test_a_weight_that_changes_in_place_changes_prompts(monkeypatch):
    model = injected("qwen3_5_text")
    prompt = torch.arange(2, 40)[None]
    before = model(prompt, past_key_values=HeteroCache(model, 256)).logits
    for layer in layers(model):
        if layer.is_recurrent:
            layer.attention.conv1d.weight.data.mul_(1.5)
    after = model(prompt, past_key_values=HeteroCache(model, 256)).logits
    monkeypatch.setattr(FusedRecurrentLayer, "mixer_forward", None)
    assert relative(after, model(prompt, past_key_values=HeteroCache(model, 256)).logits) < 1e-3
    assert relative(after, before) > 0.01


def test_an_error_in_a_prompt_gives_the_module_its_forward_back(monkeypatch):
    model = injected("qwen3_5_text")
    decoded(model, tokens=1)

    def failing(self, hidden_states, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(DeltaNetPrompt, "__call__", failing)
    with pytest.raises(KeyboardInterrupt):
        decoded(model, tokens=1)
    assert all("forward" not in layer.attention.__dict__ for layer in layers(model) if layer.is_recurrent)


def test_other_recurrent_layers_take_the_general_way():
    model = injected("olmo_hybrid")
    decoded(model, tokens=1)
    assert all(layer._native is None for layer in layers(model) if layer.is_recurrent)
