"""Layers with Mamba's scans pass prompts and tokens in kernels, with packed and other weights, as their modules do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter import recurrent
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.fused_recurrent_layer import FusedRecurrentLayer
from hetero_kv.adapter.kernel_mixer import KernelMixer
from hetero_kv.adapter.recurrent_prompt import MixerForward
from hetero_kv.adapter.selective_form import SelectiveForm
from hetero_kv.adapter.state_space_form import Mamba2Form
from hetero_kv.engine.recurrent_state import is_state, named_states
from tests.operators.bounded_models import relative_error, tokens
from tests.support.slow_variants import combined
from tests.support.tiny_models import tiny_model
from tests.support.unpacked_layers import unpack

SETTINGS = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "chunk_size": 32}
PACKED = {**SETTINGS, "weights": "q8_0"}
IDS = tokens(110)
#: A prompt in four chunks, the last of one token; two tokens; a turn.
PARTS = (0, 97), (97, 98), (98, 99), (99, 110)
#: Granite 4 without experts, and Jamba.
DENSE, ONE_EXPERT = {"num_local_experts": 0}, {"num_experts": 1, "num_experts_per_tok": 1}
SLOW, BAMBA = pytest.mark.slow, ("bamba", {"mamba_n_groups": 2})
GRANITE, DENSE_GRANITE = ("granitemoehybrid", {}), ("granitemoehybrid", DENSE)


@pytest.fixture(params=[1, 2])
def threads(request):
    """Kernels and torch compute on one thread, or two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def layers(model):
    return [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]


def recurrent_layers(model):
    return [layer for layer in layers(model) if layer.is_recurrent]


@torch.no_grad()
def conversation(model, cache, parts=PARTS):
    logits = []
    for first, end in parts:
        # Bamba alone would count positions from zero.
        positions = torch.arange(first, end)[None]
        logits.append(model(IDS[:, first:end], past_key_values=cache, position_ids=positions, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def states(cache):
    return [state for layer in cache.layers if is_state(layer) for state in named_states(layer).values()]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("architecture", "changes"), [BAMBA, pytest.param(*GRANITE, marks=SLOW), DENSE_GRANITE])
def test_kernels_compute_what_the_untouched_model_does(architecture, changes):
    model = tiny_model(architecture, **changes)
    theirs = DynamicCache(config=model.config)
    expected = conversation(model, theirs)
    inject(model, "dense", command_line=SETTINGS)
    mine = HeteroCache(model)
    assert relative_error(conversation(model, mine), expected) < 1e-4
    assert [type(layer._native) for layer in recurrent_layers(model)] == [KernelMixer] * 2
    for state, their_state in zip(states(mine), states(theirs), strict=True):
        assert relative_error(state, their_state) < 1e-4


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("architecture", "changes", "other_way"),
    [
        *(("falcon_h1", changes, "continues_in_chunks") for changes in ({}, {"mamba_rms_norm": True})),
        ("jamba", {}, "token_by_token"),
        ("jamba", {"mamba_conv_bias": False, "mamba_proj_bias": True}, "token_by_token"),
    ],
)
def test_kernels_compute_a_whole_prompt_as_the_untouched_model(architecture, changes, other_way, monkeypatch):
    """Beside attention, and by scans of all tokens that continue from a state."""
    model = tiny_model(architecture, **changes)
    # Behind a cache transformers' Jamba begins a turn with an empty state: all at once.
    expected = model(IDS).logits
    inject(model, "dense", command_line=SETTINGS)
    monkeypatch.setattr(recurrent, other_way, None)
    assert relative_error(conversation(model, HeteroCache(model)), expected) < 1e-4
    kernels = [layer._native if architecture == "jamba" else layer._kernels for layer in recurrent_layers(model)]
    assert {type(each) for each in kernels} == {KernelMixer}


@torch.no_grad()
@pytest.mark.parametrize("factor", ["mup_vector", "ssm_in_multiplier"])
def test_factors_that_change_change_what_is_computed(factor, monkeypatch):
    model = tiny_model("falcon_h1")
    inject(model, "dense", command_line=SETTINGS)
    before = conversation(model, HeteroCache(model))
    for layer in layers(model):
        mixer = layer.wrapped.mamba
        if factor == "mup_vector":
            mixer.mup_vector.data.mul_(1.5).add_(0.1)
        else:
            mixer.ssm_in_multiplier = 0.4
    after = conversation(model, HeteroCache(model))
    assert [type(layer._kernels) for layer in layers(model)] == [KernelMixer] * 3
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative_error(after, conversation(model, HeteroCache(model))) < 1e-4
    assert relative_error(after, before) > 1e-3


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_time_steps_are_limited_in_prompts_and_not_in_tokens_as_in_the_untouched_model(chunk_size):
    model = tiny_model("granitemoehybrid", time_step_limit=(0.3, 0.8))
    whole = model(IDS).logits
    expected = conversation(model, DynamicCache(config=model.config))
    # The limits matter, and a decoded token has none.
    assert relative_error(expected, whole) > 0.01
    inject(model, "dense", command_line={**SETTINGS, "chunk_size": chunk_size})
    assert relative_error(conversation(model, HeteroCache(model)), expected) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "changes"), [GRANITE, *(pytest.param(*each, marks=SLOW) for each in (BAMBA, DENSE_GRANITE))]
)
def test_layers_of_packed_weights_are_fused(architecture, changes, monkeypatch):
    model = tiny_model(architecture, **changes)
    inject(model, "dense", command_line=PACKED)
    logits = conversation(model, HeteroCache(model))
    kinds = [FusedRecurrentLayer if layer.is_recurrent else FusedDecodeLayer for layer in layers(model)]
    assert [type(layer._native) for layer in layers(model)] == kinds
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_decode", lambda self: None)
    # A code of 8 bits that is rounded otherwise, among 64 of a row.
    assert relative_error(logits, conversation(model, HeteroCache(model))) < 3e-2


#: The time steps' rank: one that blocks cannot have, and one that they can, whose numbers are unpacked.
@pytest.mark.parametrize("changes", [{"mamba_dt_rank": 8}, {"mamba_dt_rank": 32}, {"mamba_dt_rank": 32, **ONE_EXPERT}])
def test_selective_layers_of_packed_weights_are_fused(changes, monkeypatch):
    model = tiny_model("jamba", **changes)
    inject(model, "dense", command_line=PACKED)
    logits = conversation(model, HeteroCache(model))
    assert [type(layer._native) for layer in recurrent_layers(model)] == [FusedRecurrentLayer] * 2
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < 3e-2


# tests/operators/test_fused_hybrids.py has packed weights of two models with Bamba's scan.
@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("bamba", SETTINGS), ("jamba", SETTINGS), ("jamba", PACKED), pytest.param("bamba", PACKED, marks=SLOW)],
)
def test_rows_of_several_lengths_equal_each_row_alone(architecture, settings):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=settings)
    ids, padded = tokens(43, batch=3), (9, 23, 0)

    def passed(rows, first):
        mask = torch.tensor([[column >= padded[row] for column in range(first, 43)] for row in rows]).long()
        own, cache = ids[rows, first:], HeteroCache(model)
        ends = [0, *range(40 - first, 44 - first)]
        logits = [
            model(own[:, start:end], past_key_values=cache, attention_mask=mask[:, :end]).logits[:, -1:]
            for start, end in pairwise(ends)
        ]
        return torch.cat(logits, dim=1)

    together = passed([0, 1, 2], 0)
    for row, first in enumerate(padded):
        assert relative_error(together[row : row + 1], passed([row], first)) < 1e-4


def test_matrices_of_few_outputs_may_be_numbers(monkeypatch):
    model = tiny_model("jamba")
    inject(model, "dense", command_line=PACKED)
    for layer in recurrent_layers(model):
        unpack(layer.attention, "x_proj")
    logits = conversation(model, HeteroCache(model))
    assert [type(layer._native) for layer in recurrent_layers(model)] == [FusedRecurrentLayer] * 2
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < 3e-2


@pytest.mark.parametrize(
    ("wrong", "settings"), combined(["decay", "time_bias", "skip", "weight", "has_norms"], [SETTINGS, PACKED])
)
def test_wrong_numbers_of_a_scan_are_noticed(wrong, settings, monkeypatch, caplog):
    found = SelectiveForm.of

    def seeded(mixer):
        form = found(mixer)
        right = getattr(form, wrong)
        return replace(form, **{wrong: False if wrong == "has_norms" else right * 1.2 + 0.1})

    monkeypatch.setattr(SelectiveForm, "of", seeded)
    model = tiny_model("jamba")
    inject(model, "dense", command_line=settings)
    conversation(model, HeteroCache(model), ((0, 20), (20, 21)))
    assert [layer._native for layer in recurrent_layers(model)] == [None] * 2
    assert "the mixer's kernel differs from the layer" in caplog.text
    assert ("the fused recurrent layer differs from the layer" in caplog.text) == (settings is PACKED)


@pytest.mark.parametrize(("architecture", "settings"), [("bamba", SETTINGS), ("bamba", PACKED), ("jamba", SETTINGS)])
def test_numbers_are_the_same_in_bfloat16(architecture, settings, monkeypatch):
    model = tiny_model(architecture).to(torch.bfloat16)
    inject(model, "dense", command_line={**settings, "kv_type": "BF16"})
    logits = conversation(model, HeteroCache(model))
    assert all(isinstance(layer._native, FusedRecurrentLayer | KernelMixer) for layer in recurrent_layers(model))
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    expected = conversation(model, HeteroCache(model))
    # The module rounds more often.
    assert (logits - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize(
    ("wrong", "settings"),
    combined(["decay", "time_bias", "skip", "weight", "norm", "groups of norm"], [SETTINGS, PACKED]),
)
def test_wrong_numbers_are_noticed(wrong, settings, monkeypatch, caplog):
    found = Mamba2Form.of

    def seeded(mixer):
        form = found(mixer)
        if wrong == "weight":
            return replace(form, weight=form.weight * 1.2 + 0.1)
        factors, epsilon, groups, last = form.norm
        if wrong == "norm":
            return replace(form, norm=(factors * 1.2 + 0.1, epsilon, groups, last))
        if wrong == "groups of norm":
            return replace(form, norm=(factors, epsilon, 2 * groups, last))
        index = ("decay", "time_bias", "skip").index(wrong)
        numbers = [each * 1.2 + 0.1 if each is form.numbers[index] else each for each in form.numbers]
        return replace(form, numbers=tuple(numbers))

    monkeypatch.setattr(Mamba2Form, "of", seeded)
    model = tiny_model("bamba")
    inject(model, "dense", command_line=settings)
    conversation(model, HeteroCache(model), ((0, 20), (20, 21)))
    assert [layer._native for layer in recurrent_layers(model)] == [None] * 2
    assert "the mixer's kernel differs from the layer" in caplog.text
    assert ("the fused recurrent layer differs from the layer" in caplog.text) == (settings is PACKED)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("bamba", each) for each in ("D", "A_log", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")),
        *(("jamba", each) for each in ("D", "A_log", "dt_proj.bias", "dt_proj.weight", "b_layernorm.weight")),
    ],
)
def test_numbers_that_change_in_place_change_what_is_computed(architecture, name, monkeypatch):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=SETTINGS)
    before = conversation(model, HeteroCache(model))
    for layer in recurrent_layers(model):
        layer.attention.get_parameter(name).data.mul_(1.5).add_(0.1)
    after = conversation(model, HeteroCache(model))
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative_error(after, conversation(model, HeteroCache(model))) < 1e-4
    assert relative_error(after, before) > 1e-3


@pytest.mark.parametrize("settings", [SETTINGS, PACKED])
@pytest.mark.parametrize("changed", ["group_size", "activation"])
def test_settings_that_change_change_what_is_computed(changed, settings, monkeypatch):
    model = tiny_model("bamba", mamba_n_groups=2)
    inject(model, "dense", command_line=settings)
    before = conversation(model, HeteroCache(model))
    for layer in recurrent_layers(model):
        mixer = layer.attention
        if changed == "activation":
            mixer.activation = "gelu"
        else:
            mixer.norm.group_size *= 2
    after = conversation(model, HeteroCache(model))
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_recurrent", lambda self: None)
    assert relative_error(after, conversation(model, HeteroCache(model))) < 3e-2
    assert relative_error(after, before) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["bamba", "jamba"])
def test_tokens_that_kernels_cannot_take_pass_the_module_behind_its_state(architecture, monkeypatch):
    model = tiny_model(architecture)
    expected = conversation(model, None, [(0, 110)])
    inject(model, "dense", command_line=SETTINGS)
    cache = HeteroCache(model)
    parts = [conversation(model, cache, PARTS[:1])]
    monkeypatch.setattr(MixerForward, "fits", staticmethod(lambda *_: False))
    parts.append(conversation(model, cache, PARTS[1:]))
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-4
    # Neither does a forward that is in place ignore a state.
    path = recurrent_layers(model)[0]._native
    assert path.mixer_forward.difference_from_module(torch.randn(1, 6, 64), 3) < 1e-4


def test_projections_under_autocast_are_nothing_that_kernels_take():
    hidden, state = torch.zeros(1, 2, 64), LinearAttentionLayer(1)
    assert MixerForward.fits(hidden, state)
    with torch.autocast("cpu", torch.bfloat16):
        assert not MixerForward.fits(hidden, state)


@pytest.mark.parametrize("architecture", ["bamba", "jamba"])
def test_a_state_is_float32_whatever_the_default(architecture):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=SETTINGS)
    expected = conversation(model, HeteroCache(model))
    torch.set_default_dtype(torch.bfloat16)
    try:
        logits = conversation(model, HeteroCache(model))
    finally:
        torch.set_default_dtype(torch.float32)
    assert relative_error(logits, expected) < 1e-4


@pytest.mark.parametrize("settings", [SETTINGS, PACKED])
def test_a_prompt_passes_in_chunks_under_autocast(settings):
    model = tiny_model("bamba")
    inject(model, "dense", command_line=settings)
    expected = conversation(model, HeteroCache(model))
    with torch.autocast("cpu", torch.bfloat16):
        logits = conversation(model, HeteroCache(model)).float()
    assert relative_error(logits, expected) < 0.1


def test_a_mixer_with_another_activation_has_no_form():
    model = tiny_model("bamba", hidden_act="gelu")
    inject(model, "dense", command_line=SETTINGS)
    logits = conversation(model, HeteroCache(model))
    assert logits.isfinite().all()
    assert [layer._native for layer in recurrent_layers(model)] == [None] * 2
