"""A fused prefill layer equals the layer, and is not used where it would differ."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from hetero_kv.adapter.llama_layer import largest_difference
from hetero_kv.errors import UnsupportedModelError
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

EVERYTHING = {"max_seq_len": 256, "kv_type": "FP32", "chunk_size": 32}
SETTINGS = {"block_size": 4} | EVERYTHING
PROMPT = (torch.arange(150) % 90 + 2).view(2, 75)


def layers(model):
    return [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]


@torch.no_grad()
def logits_of(model, prompt=PROMPT):
    """Logits of a prompt, and of another turn behind it."""
    cache = HeteroCache(model, 256)
    first = model(prompt[:, :60], past_key_values=cache).logits
    return torch.cat([first, model(prompt[:, 60:], past_key_values=cache).logits], dim=1)


@pytest.fixture
def taken(monkeypatch):
    """How often a chunk took the short way."""
    calls, way = [], FusedPrefillLayer.__call__
    monkeypatch.setattr(FusedPrefillLayer, "__call__", lambda self, *args: (calls.append(self), way(self, *args))[1])
    return calls


def by_own_steps(model, prompt=PROMPT):
    """The same, by the layers' own steps."""
    with patch.object(FusedPrefillLayer, "fits", return_value=False):
        return logits_of(model, prompt)


def relative(mine, expected):
    return float((mine - expected).norm() / expected.norm())


@pytest.mark.parametrize("weights", ["as_stored", "q8_0"])
@pytest.mark.parametrize("architecture", with_slow(["llama", "qwen2", "qwen3", "mistral"], slow=["mistral"]))
def test_prompts_are_the_same_the_short_way(architecture, weights, taken):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=EVERYTHING | {"weights": weights})
    short = logits_of(model)
    # Two chunks of the first turn and one of the second, in three layers.
    assert len(taken) == 9
    # Activations that are rounded to eight bits may fall to the other side.
    assert relative(short, by_own_steps(model)) < (1e-5 if weights == "as_stored" else 2e-2)
    assert len(taken) == 9


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_prompts_are_the_same_the_short_way_in_bfloat16(architecture, taken):
    model = tiny_model(architecture).to(torch.bfloat16)
    inject(model, "quest", command_line=SETTINGS)
    short = logits_of(model)
    assert len(taken) == 9
    assert relative(short, by_own_steps(model)) < 1e-2


@pytest.mark.parametrize(
    "recipe",
    with_slow(
        ["adaptive", "cascade", "h2o", "infinigen", "infinipot", "infllm_stream", "minference", "self_extend",
         "shadowkv", "streaming_llm", "snapkv"],
        slow=["infinigen", "infinipot", "minference", "self_extend", "snapkv", "streaming_llm"],
    ),
)  # fmt: skip
def test_prompts_of_every_family_take_the_short_way(recipe, taken):
    """Families record rotations, replace them or re-index positions through the arguments of attention."""

    def fresh():
        model = tiny_model("qwen3")
        small = {"max_seq_len": 256, "chunk_size": 32} | ({"rank": 16} if recipe == "shadowkv" else {})
        inject(model, recipe, command_line=small)
        return model

    short = logits_of(fresh(), PROMPT[:1])
    assert taken
    count = len(taken)
    assert relative(short, by_own_steps(fresh(), PROMPT[:1])) < 1e-4
    assert len(taken) == count


def test_layers_that_compute_something_else_go_on_by_themselves(taken):
    """Granite has the parts of Llama and scales what they add; one of SmolLM3's layers does not rotate."""
    granite = tiny_model("granite")
    inject(granite, "quest", command_line=SETTINGS)
    logits_of(granite)
    assert [layer._short for layer in layers(granite)] == [None] * 3
    mixed = tiny_model("smollm3")
    inject(mixed, "quest", command_line=SETTINGS)
    logits_of(mixed)
    assert [layer._short is None for layer in layers(mixed)] == [False, True, False]
    assert len(taken) == 6


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "gpt_neox", "mixtral"])
def test_layers_of_another_form_go_on_by_themselves(architecture, taken):
    model = tiny_model(architecture)
    inject(model, "quest", command_line=SETTINGS)
    logits_of(model)
    assert [layer._short for layer in layers(model)] == [None] * 3
    assert not taken


@pytest.mark.parametrize("wrong", ["_norms", "_head_norms", "_activation", "_gate"])
def test_a_wrong_way_is_noticed(wrong, monkeypatch, taken):
    made = FusedPrefillLayer.__init__

    def seeded(self, layer, operator):
        made(self, layer, operator)
        wrongly = {"_norms": self._norms[::-1], "_head_norms": [None, None], "_activation": 1, "_gate": self._up}
        setattr(self, wrong, wrongly[wrong])

    monkeypatch.setattr(FusedPrefillLayer, "__init__", seeded)
    model = tiny_model("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.post_attention_layernorm, layer.self_attn.q_norm):
                norm.weight.mul_(1.2)
    inject(model, "quest", command_line=SETTINGS)
    logits_of(model)
    assert [layer._short for layer in layers(model)] == [None] * 3
    assert not taken


@pytest.mark.parametrize("part", ["mlp", "mlp.act_fn", "self_attn.wrapped.q_proj", "mlp.gate_proj"])
def test_hooks_on_a_part_see_it_and_their_values_are_not_overwritten(part, taken):
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    heard, expected = [], []
    module = layers(model)[1].wrapped.get_submodule(part)
    hook = module.register_forward_hook(lambda module, args, output: heard.append((output, output.clone())))
    logits = logits_of(model)
    assert [output.shape[1] for output, _ in heard] == [32, 28, 15]
    assert all(torch.equal(output, as_it_was) for output, as_it_was in heard)
    assert len(taken) == 6
    hook.remove()
    assert relative(logits_of(model), logits) < 1e-5
    assert len(taken) == 15
    forward = type(module).forward
    with patch.object(module, "forward", side_effect=lambda x: expected.append(x) or forward(module, x)):
        logits_of(model)
    assert len(expected) == 3
    handle = nn.modules.module.register_module_forward_hook(lambda *args: expected.append(args))
    try:
        logits_of(model)
    finally:
        handle.remove()
    assert len(taken) == 15 + 6


class Doubled(nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x):
        return 2 * self.wrapped(x)


@pytest.mark.parametrize("change", ["projection", "activation", "scaling", "norm", "dtype"])
def test_a_part_that_is_exchanged_after_the_first_prompt_counts_in_the_next(change, taken):
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    before = logits_of(model)
    layer = layers(model)[1].wrapped
    if change == "projection":
        layer.mlp.up_proj = Doubled(layer.mlp.up_proj)
    elif change == "activation":
        layer.mlp.act_fn = nn.ReLU()
    elif change == "scaling":
        layer.self_attn.wrapped.scaling *= 3
    elif change == "norm":
        layer.input_layernorm = Doubled(layer.input_layernorm)
    else:
        model.to(torch.float16)
    after = logits_of(model)
    # A layer goes on by itself where it no longer has the form, and all of them do in a dtype that kernels lack.
    assert len(taken) == 9 + {"projection": 9, "scaling": 9, "dtype": 0}.get(change, 6)
    assert relative(after, by_own_steps(model)) < (1e-2 if change == "dtype" else 1e-5)
    assert change == "dtype" or relative(after, before) > 1e-2
    if change == "dtype":
        assert relative(logits_of(model.to(torch.float32)), before) < 1e-2
        assert len(taken) == 18


def test_extra_arguments_of_attention_are_not_ignored(taken):
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    logits_of(model)
    for argument in ({"is_causal": False}, {"scores_of_mine": 1.0}):
        with pytest.raises(UnsupportedModelError), torch.no_grad():
            model(PROMPT, past_key_values=HeteroCache(model, 256), **argument)
    with torch.no_grad():
        plain, capped = (
            model(PROMPT, past_key_values=HeteroCache(model, 256), **of).logits for of in ({}, {"softcap": 1.0})
        )
    assert relative(capped, plain) > 1e-4
    count = len(taken)
    model.train()
    logits_of(model)
    assert len(taken) == count


def test_norms_without_a_weight_are_another_form(taken):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo", **sizes)).eval()
    with torch.no_grad():
        expected = model(PROMPT).logits
        inject(model, "dense", command_line=EVERYTHING)
        assert relative(model(PROMPT, past_key_values=HeteroCache(model, 256)).logits, expected) < 1e-5
    assert not taken


def test_a_layer_that_gives_a_tuple_goes_on_by_itself(taken):
    model = tiny_model("qwen2")
    kind = type(model.model.layers[0])

    class Tupled(kind):
        def forward(self, *args, **kwargs):
            return (super().forward(*args, **kwargs),)

    inject(model, "dense", command_line=EVERYTHING)
    layer = layers(model)[0]
    layer.wrapped.__class__ = Tupled
    assert FusedPrefillLayer.of(layer.wrapped, layer.attention) is None
    outputs = []
    layer.register_forward_hook(lambda module, call_args, output: outputs.append(output) or output[0])
    logits_of(model)
    assert len(taken) == 6
    assert all(isinstance(output, tuple) for output in outputs)


def test_non_finite_results_have_no_known_difference():
    ones, worse = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert largest_difference([ones, ones], [ones, ones]) == 0
    for pair in ((worse, ones), (ones, worse), (ones, ones / 0), (ones, torch.ones(4))):
        assert largest_difference([ones, pair[0]], [ones, pair[1]]) == float("inf")


def test_changes_after_the_first_prompt_apply_to_the_next(taken):
    model = tiny_model("qwen3")
    inject(model, "quest", command_line=SETTINGS)
    before = logits_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "gate_proj" in name:
                parameter.mul_(1.5)
    after = logits_of(model)
    assert relative(after, by_own_steps(model)) < 1e-5
    assert relative(after, before) > 1e-2


def test_under_autocast_the_layers_run_themselves(taken):
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(PROMPT, past_key_values=HeteroCache(model, 256))
    assert not taken
    logits_of(model)
    assert len(taken) == 9


def said_of_the_short_way(caplog):
    return [record.getMessage() for record in caplog.records if "the fused prefill layer" in record.getMessage()]


def test_a_layer_that_is_told_positions_has_another_form_and_nothing_is_said_of_it(taken, caplog):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = AutoConfig.for_model(
        "ministral3",
        **{name: getattr(tiny_model("mistral").config, name) for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim",
        )},
        max_position_embeddings=256,
        rope_parameters=yarn | {"llama_4_scaling_beta": 0.1},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        expected = model(PROMPT).logits
    inject(model, "dense", command_line=EVERYTHING)
    assert relative(logits_of(model), expected) < 1e-5
    assert taken == []
    assert said_of_the_short_way(caplog) == []


def test_a_way_that_cannot_be_tried_is_said_once_for_a_model_without_foreign_words(monkeypatch, taken, caplog):
    model = tiny_model("llama")
    inject(model, "dense", command_line=EVERYTHING)
    foreign = TypeError("unsupported operand type(s) for /: 'NoneType' and 'int'")
    monkeypatch.setattr(FusedPrefillLayer, "difference_from", lambda self, layer: (_ for _ in ()).throw(foreign))
    logits_of(model)
    (said,) = said_of_the_short_way(caplog)
    assert "cannot be tested" in said
    assert "operand" not in said
