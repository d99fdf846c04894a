"""A prompt's short way through a layer gives what the layer gives, and is not taken where it does not."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.prompt_layer import PromptLayer

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
    calls, way = [], PromptLayer.__call__
    monkeypatch.setattr(PromptLayer, "__call__", lambda self, *given: (calls.append(self), way(self, *given))[1])
    return calls


def without_short_way(model):
    for layer in layers(model):
        layer._short = None


def relative(mine, wanted):
    return float((mine - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("weights", ["as_stored", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_prompts_are_the_same_the_short_way(architecture, weights, taken):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=EVERYTHING | {"weights": weights})
    short = logits_of(model)
    # Two chunks of the first turn and one of the second, in three layers.
    assert len(taken) == 9
    without_short_way(model)
    # Activations that are rounded to eight bits may fall to the other side.
    assert relative(short, logits_of(model)) < (1e-5 if weights == "as_stored" else 2e-2)
    assert len(taken) == 9


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_prompts_are_the_same_the_short_way_in_bfloat16(architecture, taken):
    model = tiny_model(architecture).to(torch.bfloat16)
    inject(model, "quest", command_line=SETTINGS)
    short = logits_of(model)
    assert len(taken) == 9
    without_short_way(model)
    assert relative(short, logits_of(model)) < 1e-2


@pytest.mark.parametrize(
    "recipe",
    ["adaptive", "cascade", "h2o", "infinigen", "infinipot", "infllm_stream", "minference", "self_extend", "shadowkv",
     "streaming_llm", "snapkv"],
)  # fmt: skip
def test_prompts_of_every_family_take_the_short_way(recipe, taken):
    """Families note rotations, exchange them, or re-index positions: with the arguments that attention is given."""

    def fresh():
        model = tiny_model("qwen3")
        small = {"max_seq_len": 256, "chunk_size": 32} | ({"rank": 16} if recipe == "shadowkv" else {})
        inject(model, recipe, command_line=small)
        return model

    short = logits_of(fresh(), PROMPT[:1])
    assert taken
    count, general = len(taken), fresh()
    without_short_way(general)
    assert relative(short, logits_of(general, PROMPT[:1])) < 1e-4
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
    made = PromptLayer.__init__

    def seeded(self, layer, operator):
        made(self, layer, operator)
        wrongly = {"_norms": self._norms[::-1], "_head_norms": [None, None], "_activation": 1, "_gate": self._up}
        setattr(self, wrong, wrongly[wrong])

    monkeypatch.setattr(PromptLayer, "__init__", seeded)
    model = tiny_model("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.post_attention_layernorm, layer.self_attn.q_norm):
                norm.weight.mul_(1.2)
    inject(model, "quest", command_line=SETTINGS)
    logits_of(model)
    assert [layer._short for layer in layers(model)] == [None] * 3
    assert not taken


def test_who_listens_to_what_the_way_leaves_out_hears_it(taken):
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    heard = []
    for module in (layers(model)[1].wrapped.mlp, layers(model)[2].wrapped.mlp.act_fn):
        module.register_forward_hook(lambda module, given, output: heard.append(output.shape[1]))
    logits_of(model)
    assert heard == [32, 28, 32, 28, 15, 15]
    assert {id(way) for way in taken} == {id(layers(model)[0]._short)}


def test_what_changes_after_the_first_prompt_counts_in_the_next(taken):
    model = tiny_model("qwen3")
    inject(model, "quest", command_line=SETTINGS)
    before = logits_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "gate_proj" in name:
                parameter.mul_(1.5)
    after = logits_of(model)
    without_short_way(model)
    assert relative(after, logits_of(model)) < 1e-5
    assert relative(after, before) > 1e-2


def test_what_autocast_rounds_is_the_layers_own_matter(taken):
    model = tiny_model("qwen2")
    inject(model, "quest", command_line=SETTINGS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(PROMPT, past_key_values=HeteroCache(model, 256))
    assert not taken
    logits_of(model)
    assert len(taken) == 9
