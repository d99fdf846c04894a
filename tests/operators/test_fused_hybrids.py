"""Falcon-H1's and Nemotron-H's decoded tokens pass fused layers: two mixers at once, and layers of one module alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.decoder_form import DecoderForm
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.fused_feed_forward_layer import FusedFeedForwardLayer
from hetero_kv.adapter.fused_recurrent_layer import FusedRecurrentLayer
from hetero_kv.adapter.kernel_mixer import KernelMixer
from hetero_kv.adapter.packed_mlp import PackedMLP
from hetero_kv.adapter.state_space_form import Mamba2Form
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.engine.recurrent_state import is_state, named_states
from hetero_kv.errors import HeteroKVError
from tests.operators.bounded_models import relative_error, tokens
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model
from tests.support.unpacked_layers import unpack

SETTINGS = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0"}
#: A code of 8 bits that is rounded otherwise, among 64 of a row.
ROUNDING = 3e-2
IDS = tokens(60)
#: A prompt, four tokens, a turn, two tokens.
PARTS = (0, 41), (41, 42), (42, 43), (43, 44), (44, 45), (45, 56), (56, 57), (57, 58)
MULTIPLIERS = {"mlp_multipliers": [0.7, 1.3], "attention_out_multiplier": 0.8, "ssm_out_multiplier": 1.4}
GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
MODELS = {
    "falcon_h1": ("falcon_h1", MULTIPLIERS),
    "normed falcon_h1": ("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True}),
    "biased falcon_h1": ("falcon_h1", {**MULTIPLIERS, "attention_bias": True}),
    "nemotron_h": ("nemotron_h", {}),
    "grouped nemotron_h": ("nemotron_h", GROUPS),
}
NEMOTRON = [FusedRecurrentLayer, FusedFeedForwardLayer, FusedDecodeLayer, FusedFeedForwardLayer, FusedRecurrentLayer]
PATHS = "_fused_decode", "_fused_recurrent", "_fused_feed_forward"


def layers(model):
    return [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]


def injected(name, recipe="dense", dtype=torch.float32, **settings):
    architecture, changes = MODELS[name]
    model = tiny_model(architecture, **changes).to(dtype)
    inject(model, recipe, command_line={**SETTINGS, **settings})
    return model


def kinds(model):
    return [type(layer._native) for layer in layers(model)]


@torch.no_grad()
def conversation(model, cache, parts=PARTS, ids=IDS):
    positions = [torch.arange(first, end).expand(len(ids), -1) for first, end in parts]
    return torch.cat(
        [
            model(ids[:, first:end], past_key_values=cache, position_ids=where).logits
            for (first, end), where in zip(parts, positions, strict=True)
        ],
        dim=1,
    )


def states(cache):
    return [state for layer in cache.layers if is_state(layer) for state in named_states(layer).values()]


def unfused(monkeypatch):
    for name in PATHS:
        monkeypatch.setattr(ChunkedDecoderLayer, name, lambda self: None)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", with_slow(list(MODELS), slow=["biased falcon_h1"]))
def test_tokens_pass_fused_layers_as_their_modules(name, rows, monkeypatch):
    model, ids = injected(name), torch.cat([IDS, tokens(60, batch=2)])[:rows]
    mine, theirs = HeteroCache(model), HeteroCache(model)
    logits = conversation(model, mine, ids=ids)
    assert kinds(model) == ([FusedDecodeLayer] * 3 if "falcon" in name else NEMOTRON)
    if "falcon" in name:
        assert {type(layer._kernels) for layer in layers(model)} == {KernelMixer}
    unfused(monkeypatch)
    assert relative_error(logits, conversation(model, theirs, ids=ids)) < ROUNDING
    assert len(states(mine)) == len(states(theirs)) > 0
    for state, their_state in zip(states(mine), states(theirs), strict=True):
        assert relative_error(state, their_state) < ROUNDING


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_tokens_equal_those_of_the_untouched_model(name, monkeypatch):
    """Up to weights of 8 bits."""
    architecture, changes = MODELS[name]
    with torch.no_grad():
        expected = tiny_model(architecture, **changes)(IDS[:, :58]).logits
    model = injected(name)
    logits = conversation(model, HeteroCache(model))
    assert (logits - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize(("name", "kernels"), [("falcon_h1", 3 * 5), ("nemotron_h", 2 + 1 + 3 + 1 + 2)])
def test_a_token_is_one_run_of_the_queue(name, kernels, monkeypatch):
    model = injected(name)
    conversation(model, HeteroCache(model), PARTS[:2])
    found, run = [], KernelQueue.run

    def counted(self):
        found.append(len(self._arguments))
        run(self)

    monkeypatch.setattr(KernelQueue, "run", counted)
    cache = HeteroCache(model)
    # The first token binds the attentions' native calls.
    conversation(model, cache, PARTS[:2])
    found.clear()
    conversation(model, cache, PARTS[2:5])
    assert [count for count in found if count] == [kernels] * 3


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
@pytest.mark.parametrize("recipe", with_slow(["adaptive", "tova"], slow=["adaptive"]))
def test_tokens_pass_fused_layers_under_other_rules(name, recipe, monkeypatch):
    architecture, changes = MODELS[name]
    model = tiny_model(architecture, **changes)
    inject(model, recipe, command_line={"max_seq_len": 256, "weights": "q8_0"})
    logits = conversation(model, HeteroCache(model))
    assert FusedDecodeLayer in kinds(model)
    assert None.__class__ not in kinds(model)
    unfused(monkeypatch)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < ROUNDING


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_forks_go_on_alone_and_going_back_is_refused(name):
    model = injected(name)
    cache, whole = HeteroCache(model), HeteroCache(model)
    expected = conversation(model, whole)
    conversation(model, cache, PARTS[:3])
    fork, before = cache.fork(), [state.clone() for state in states(cache)]
    other = conversation(model, fork, PARTS[3:], tokens(60, 7))
    assert all(now.equal(then) for now, then in zip(states(cache), before, strict=True))
    again = conversation(model, cache, PARTS[3:])
    assert again.equal(expected[:, 43:])
    assert relative_error(other, again) > 0.1
    with pytest.raises(HeteroKVError, match="cannot roll back"):
        fork.crop(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_an_interrupted_token_leaves_the_states_as_they_were(name, monkeypatch):
    model, cache = injected(name), None
    cache = HeteroCache(model)
    conversation(model, cache, PARTS[:3])
    before = [state.clone() for state in states(cache)]
    expected = conversation(model, cache.fork(), PARTS[3:4])
    last = layers(model)[-1]

    def interrupted(self, *arguments):
        # Behind the kernels, which have updated the states.
        cache.required_batch.queue.run()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(last), "_kept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation(model, cache, PARTS[3:4])
    assert all(now.equal(then) for now, then in zip(states(cache), before, strict=True))
    assert conversation(model, cache, PARTS[3:4]).equal(expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_rows_of_several_lengths_equal_each_row_alone(name):
    model = injected(name)
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
    assert None.__class__ not in kinds(model)
    for row, first in enumerate(padded):
        assert relative_error(together[row : row + 1], passed([row], first)) < 1e-4


@pytest.mark.parametrize("name", with_slow(["falcon_h1", "nemotron_h"], slow=["falcon_h1"]))
def test_tokens_are_the_same_in_bfloat16(name, monkeypatch):
    model = injected(name, dtype=torch.bfloat16, kv_type="BF16")
    logits = conversation(model, HeteroCache(model)).float()
    assert None.__class__ not in kinds(model)
    unfused(monkeypatch)
    expected = conversation(model, HeteroCache(model)).float()
    # The modules round more often.
    assert (logits - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize(
    "wrong", ["input_factor", "key_factor", "factor", "beside_factor", "mlp_factor", "gate_factor", "factors"]
)
def test_a_wrong_factor_is_noticed(wrong, monkeypatch, caplog):
    kind = PackedMLP if wrong == "gate_factor" else Mamba2Form if wrong == "factors" else DecoderForm
    found = kind.of

    def seeded(*arguments):
        form = found(*arguments)
        return None if form is None else replace(form, **{wrong: getattr(form, wrong) * 1.2})

    monkeypatch.setattr(kind, "of", seeded)
    model = injected("falcon_h1")
    conversation(model, HeteroCache(model), PARTS[:2])
    assert kinds(model) == [None.__class__] * 3
    assert "the fused decode layer differs from the layer" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "owner", "number"),
    [
        *(("falcon_h1", "", each) for each in ("attention_in_multiplier", "attn_out_multiplier", "ssm_out_multiplier")),
        ("falcon_h1", "self_attn.wrapped", "key_multiplier"),
        ("falcon_h1", "mamba", "ssm_in_multiplier"),
        *(("falcon_h1", "feed_forward", each) for each in ("gate_multiplier", "down_multiplier")),
        *(("nemotron_h", "mixer.gate", each) for each in ("norm_topk_prob", "routed_scaling_factor")),
    ],
)
def test_a_number_that_changes_changes_what_is_computed(name, owner, number, monkeypatch):
    model = injected(name)
    conversation(model, HeteroCache(model), PARTS[:2])
    changed = 0
    for layer in layers(model):
        with_number = dict(layer.wrapped.named_modules()).get(owner)
        if hasattr(with_number, number):
            value = getattr(with_number, number)
            setattr(with_number, number, not value if isinstance(value, bool) else 1.5 * value + 0.1)
            changed += 1
    assert changed
    logits = conversation(model, HeteroCache(model))
    assert None.__class__ not in kinds(model)
    unfused(monkeypatch)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < ROUNDING


@torch.no_grad()
def test_a_router_that_changes_in_place_changes_what_is_computed(monkeypatch):
    model = injected("nemotron_h")
    before = conversation(model, HeteroCache(model))
    model.get_submodule("model.layers.1").wrapped.mixer.gate.e_score_correction_bias.copy_(torch.tensor([9, 0, 0, 5]))
    after = conversation(model, HeteroCache(model))
    assert None.__class__ not in kinds(model)
    assert relative_error(after, before) > ROUNDING
    unfused(monkeypatch)
    assert relative_error(after, conversation(model, HeteroCache(model))) < ROUNDING


def test_blocks_of_another_form_take_the_general_way(monkeypatch):
    model = tiny_model("nemotron_h", mlp_hidden_act="silu", moe_latent_size=32)
    inject(model, "dense", command_line=SETTINGS)
    logits = conversation(model, HeteroCache(model))
    general = [None.__class__ if kind is FusedFeedForwardLayer else kind for kind in NEMOTRON]
    assert kinds(model) == general
    unfused(monkeypatch)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < ROUNDING


def test_a_block_with_a_hook_runs_its_module():
    model = injected("nemotron_h")
    seen = []
    block = layers(model)[3].wrapped.mixer
    handle = block.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    conversation(model, HeteroCache(model), PARTS[:3])
    assert seen == [41, 1, 1]
    handle.remove()
    conversation(model, HeteroCache(model), PARTS[:3])
    assert seen == [41, 1, 1]
    assert kinds(model) == NEMOTRON


def test_a_mixer_whose_weights_are_numbers_keeps_its_kernel_and_its_layer_the_general_way(monkeypatch):
    model = injected("falcon_h1")
    for layer in layers(model):
        unpack(layer.wrapped.mamba, "in_proj")
    logits = conversation(model, HeteroCache(model))
    assert kinds(model) == [None.__class__] * 3
    assert {type(layer._kernels) for layer in layers(model)} == {KernelMixer}
    unfused(monkeypatch)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < ROUNDING


@pytest.mark.parametrize("architecture", ["granitemoehybrid", "jamba"])
def test_attention_without_rotations_is_fused(architecture, monkeypatch):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=SETTINGS)
    called, compute = [], FusedDecodeLayer.__call__

    def counted(self, *arguments):
        called.append(self)
        return compute(self, *arguments)

    monkeypatch.setattr(FusedDecodeLayer, "__call__", counted)
    logits = conversation(model, HeteroCache(model))
    attending = [layer for layer in layers(model) if not layer.is_recurrent]
    assert [type(layer._native) for layer in attending] == [FusedDecodeLayer]
    assert len(called) == sum(end - first == 1 for first, end in PARTS)
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_decode", lambda self: None)
    assert relative_error(logits, conversation(model, HeteroCache(model))) < ROUNDING
