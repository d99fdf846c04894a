"""Models with layers other than attention: their states pass from chunk to chunk and turn to turn exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter import recurrent
from hetero_kv.adapter.attention_module import text_config
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.recurrent_state import is_state, named_states, state_layer
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.evals.generation import cache_bytes
from hetero_kv.evals.shared_prefill import shares_prefill
from hetero_kv.planning.plan import Footprint
from hetero_kv.rules.matching import InjectionError
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.bounded_models import Letters, relative_error, tokens
from tests.support.slow_variants import combined, with_few, with_slow
from tests.support.tiny_models import HYBRIDS, tiny_config, tiny_model

SETTINGS = {"chunk_size": 16, "block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "max_seq_len": 256}
EXACT = {**SETTINGS, "kv_type": "FP32", "top_k_blocks": 500}
PROMPT, TURN, TOTAL = 37, 40, 50
IDS = tokens(TOTAL)
_MIXED = {
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "num_key_value_heads": 4,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def answered(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


def states(cache):
    """Every tensor of the layers that are no attention."""
    return [state for layer in cache.layers if is_state(layer) for state in named_states(layer).values()]


#: Whose states are of the same kinds as others': `make test-slow` has them too.
ALIKE = ("qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "lfm2_moe")


@pytest.fixture(scope="module", params=with_slow(list(HYBRIDS), slow=ALIKE))
def talk(request):
    """An injected model with what it said and holds; one conversation for all tests, which go on from forks of it."""
    model = tiny_model(request.param)
    with torch.no_grad():
        whole = model(IDS).logits
    inject(model, "dense", command_line=EXACT)
    cache = HeteroCache(model)
    parts = [IDS[:, :PROMPT], *IDS[:, PROMPT:TURN].split(1, dim=1)]
    logits = torch.cat([answered(model, cache, part) for part in parts], dim=1)
    return Talk(request.param, model, cache, whole, logits, answered(model, cache.fork(), IDS[:, TURN:]))


class Talk(NamedTuple):
    """A conversation: `cache` behind a prompt and three tokens, `logits` of these, `second` of a turn behind them.

    `whole` are those of transformers, all tokens at once.
    """

    architecture: str
    model: Any
    cache: HeteroCache
    whole: torch.Tensor
    logits: torch.Tensor
    second: torch.Tensor


def test_chunks_tokens_and_a_second_turn_equal_transformers_at_once(talk):
    assert relative_error(torch.cat([talk.logits, talk.second], dim=1), talk.whole) < 1e-4


def test_a_saved_context_goes_on_bit_for_bit(talk, tmp_path):
    talk.cache.save(tmp_path / "context", IDS[:, :TURN])
    loaded = HeteroCache.load(tmp_path / "context", talk.model)
    assert all(one.equal(other) for one, other in zip(states(loaded), states(talk.cache), strict=True))
    assert answered(talk.model, loaded, IDS[:, TURN:]).equal(talk.second)


def test_forks_and_rows_named_twice_go_on_alone(talk):
    fork, before = talk.cache.fork(), [state.clone() for state in states(talk.cache)]
    fork.select([0, 0])
    both = torch.cat([IDS[:, TURN : TURN + 3], tokens(3, 3)])
    own, other = answered(talk.model, fork, both)
    assert relative_error(own, talk.second[0, :3]) < 1e-4
    assert relative_error(other, talk.second[0, :3]) > 1e-2
    # What a fork has heard changes nothing in another, to the bit.
    assert all(now.equal(then) for now, then in zip(states(talk.cache), before, strict=True))


def test_a_forward_that_fails_leaves_the_states_as_they_were_however_often(talk, monkeypatch):
    cache, before = talk.cache.fork(), [state.clone() for state in states(talk.cache)]
    names = (
        name for name, _ in talk.model.named_modules() if name.endswith(("norm", "norm_f")) and name.count(".") == 1
    )
    last = talk.model.get_submodule(next(names))

    def interrupted(*_):
        assert not all(now.equal(then) for now, then in zip(states(cache), before, strict=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(last, "forward", interrupted)
    for part in (IDS[:, TURN : TURN + 2], IDS[:, TURN : TURN + 1]):
        with pytest.raises(KeyboardInterrupt):
            answered(talk.model, cache, part)
        assert all(now.equal(then) for now, then in zip(states(cache), before, strict=True))


def test_the_plan_counts_the_states_that_there_are(talk):
    model, cache = talk.model, talk.cache
    states_seen = sum(state.numel() * state.element_size() for state in states(cache))
    assert states_seen > 0
    assert Footprint.of(model.hetero_kv_injection).memory(1000).states == 2 * states_seen
    shapes = recurrent.state_shapes(model, text_config(model))
    for index, shape in shapes.items():
        there = named_states(state_layer(cache, index))
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in shape.tensors.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in there.items()
        }


def test_which_modules_forget_their_state_is_found_by_trying(talk):
    mixer = next(module for module in talk.model.modules() if recurrent.is_recurrent(module))
    continues = recurrent.continues_in_chunks("mixer", mixer, torch.zeros(1, 2, 64), 1)
    # Mamba's scan takes no state to begin with.
    assert continues == (talk.architecture != "jamba")


def test_evaluations_count_what_attention_attends_to_and_prefill_every_method_by_itself(talk):
    injection = talk.model.hetero_kv_injection
    assert attended_tokens(injection, 300) == 300
    assert not shares_prefill(injection)
    own = sum(state.numel() * state.element_size() for state in states(talk.cache))
    assert cache_bytes(talk.cache) == talk.cache.dram_bytes + talk.cache.device_bytes + own


def test_going_back_to_any_token_is_refused_by_name(talk):
    kind = "StateBeside" if talk.architecture == "falcon_h1" else "LinearAttentionLayer"
    with pytest.raises(HeteroKVError, match=rf"cannot roll back.*{kind}.*fork\(\)"):
        talk.cache.fork().crop(-1)


@pytest.mark.parametrize(("architecture", "chunk_size"), combined(list(HYBRIDS), [1, 3, 7, 64]))
def test_chunks_of_any_length_carry_the_state(architecture, chunk_size):
    """Shorter than a convolution too, and no multiple of what a scan takes at once."""
    model = tiny_model(architecture)
    with torch.no_grad():
        whole = model(IDS).logits
    inject(model, "dense", command_line={**EXACT, "chunk_size": chunk_size})
    cache = HeteroCache(model)
    parts = [answered(model, cache, part) for part in (IDS[:, :PROMPT], IDS[:, PROMPT:TURN], IDS[:, TURN:])]
    assert relative_error(torch.cat(parts, dim=1), whole) < 1e-4


@pytest.mark.parametrize("architecture", with_slow(list(HYBRIDS), slow=ALIKE))
def test_rows_of_several_lengths_equal_each_row_alone(architecture):
    model = tiny_model(architecture)
    ids, mask = tokens(40, batch=2), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :9] = 0
    with torch.no_grad():
        alone = [model(row[kept.bool()][None]).logits[:, -3:] for row, kept in zip(ids, mask, strict=True)]
    inject(model, "dense", command_line=EXACT)
    cache = HeteroCache(model)
    logits = [answered(model, cache, ids[:, :38], attention_mask=mask[:, :38])[:, -1:]]
    logits += [answered(model, cache, ids[:, i : i + 1], attention_mask=mask[:, : i + 1]) for i in range(38, 40)]
    assert relative_error(torch.cat(logits, dim=1), torch.cat(alone)) < 1e-4


@pytest.mark.parametrize("architecture", with_few(list(HYBRIDS), ("jamba",)))
def test_beams_are_those_of_the_untouched_model(architecture):
    model = tiny_model(architecture)
    beams = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    expected = model.generate(IDS, **beams)
    inject(model, "dense", command_line=EXACT)
    assert model.generate(IDS, past_key_values=HeteroCache(model), **beams).equal(expected)


@pytest.mark.parametrize(
    ("architecture", "recipe", "settings"),
    [
        ("qwen3_5_text", "streaming_llm", {"budget": 60, "stride": 13}),
        ("granitemoehybrid", "h2o", {"budget": 60}),
        ("lfm2", "quest", {"block_size": 4, "top_k_blocks": 500, "kv_type": "FP32", "dense_layer_num": 0}),
        ("lfm2", "shadowkv", {"rank": 32, "sparse_budget": 64, "local_chunks": 2, "outlier_chunks": 1}),
    ],
)
def test_attention_between_them_has_the_operators_of_every_family(architecture, recipe, settings):
    model = tiny_model(architecture)
    with torch.no_grad():
        whole = model(IDS).logits
    inject(model, recipe, command_line={"chunk_size": 16, **settings})
    cache = HeteroCache(model, max_seq_len=128)
    parts = [IDS[:, :PROMPT], *IDS[:, PROMPT:TURN].split(1, dim=1), IDS[:, TURN:]]
    logits = torch.cat([answered(model, cache, part) for part in parts], dim=1)
    assert relative_error(logits, whole) < (1e-4 if "kv_type" in settings or "budget" in settings else 1e-2)
    eject(model)
    with torch.no_grad():
        assert model(IDS).logits.equal(whole)


def test_a_catalyst_leaves_nothing_in_a_state():
    model = tiny_model("lfm2")
    states_seen = []
    for recipe, settings in {"dense": EXACT, "infinipot": {"budget": 24, "catalyst": "abc"}}.items():
        inject(model, recipe, command_line=settings)
        cache = HeteroCache(model, max_seq_len=128, tokenizer=Letters())
        answered(model, cache, IDS)
        # Below all attention, so that only what passed through it can have changed it.
        states_seen.append(states(cache)[0].clone())
        eject(model)
    torch.testing.assert_close(states_seen[0], states_seen[1], rtol=1e-5, atol=1e-5)


#: Architectures whose layers cannot be chunked: their config, and what is said.
REFUSED = {
    "zamba2": (
        {**_MIXED, "mamba_headdim": 16, "num_mem_blocks": 1, "hybrid_layer_ids": [1], "mamba_ngroups": 1},
        r"layers\.1 \(Zamba2HybridLayer\).*shared_transformer\.self_attn, mamba_decoder\.mamba.*same index",
    ),
    "recurrent_gemma": ({}, r"layers\.0 \(RecurrentGemmaDecoderLayer\) has 0 modules with a layer_idx"),
    "minimax": (
        {"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        r"layers\.0\.self_attn \(MiniMaxLightningAttention\) cannot be replaced.*attention interface",
    ),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_layers_that_cannot_be_chunked_are_refused_by_name(architecture):
    settings, said = REFUSED[architecture]
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **settings))
    with pytest.raises(UnsupportedModelError, match=said):
        inject(model, "dense")


@pytest.mark.parametrize("architecture", ["falcon_h1", "nemotron_h"])
def test_attention_that_no_rule_replaces_has_its_mask_and_the_state_beside_it(architecture):
    model = tiny_model(architecture)
    with torch.no_grad():
        whole = model(IDS).logits
    layers = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    inject(model, parse_rules({"long_context": {"chunk_size": 16}, "rules": [layers]}))
    cache = HeteroCache(model, max_seq_len=128)
    parts = [IDS[:, :PROMPT], *IDS[:, PROMPT:TURN].split(1, dim=1), IDS[:, TURN:]]
    assert relative_error(torch.cat([answered(model, cache, part) for part in parts], dim=1), whole) < 1e-4


def test_attention_whose_layers_around_it_are_not_chunked_is_refused_by_name():
    attention_alone = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    with pytest.raises(InjectionError, match=r"layers\.0\.conv.*not a ChunkedDecoderLayer.*its state is not carried"):
        inject(tiny_model("lfm2"), parse_rules({"rules": [attention_alone]}))


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ("infllm_stream", "InfLLMStreamAttention clips distances"),
        ("self_extend", "SelfExtendAttention groups positions"),
        ("shadowkv", "ShadowKVAttention undoes the rotation"),
        ("streaming_llm", "BoundedAttention with policy streaming_llm"),
    ],
)
def test_methods_that_need_positions_are_refused_by_name_in_models_without(recipe, what):
    model = tiny_model("granitemoehybrid")
    inject(model, recipe, command_line={"threads_num": 1})
    # It is seen by what the attention is called with.
    with pytest.raises(UnsupportedModelError, match=rf"layers\.1\.self_attn.*no position_embeddings.*{what}"):
        answered(model, HeteroCache(model, max_seq_len=128), IDS)


class _Averaging(nn.Module):
    """A module whose prompt is not what its tokens one by one are."""

    layer_idx = 0

    def forward(self, hidden_states, cache_params=None, attention_mask=None):
        cache_params.update_conv_state(hidden_states.transpose(1, 2), 0, conv_kernel_size=2)
        return hidden_states.mean(dim=1, keepdim=True).expand_as(hidden_states)


def test_a_module_that_computes_a_prompt_otherwise_than_its_tokens_is_refused_by_name():
    assert recurrent.is_recurrent(_Averaging())
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mixer \(_Averaging\).*one by one.*without rules"):
        recurrent.continues_in_chunks("layers.0.mixer", _Averaging(), torch.zeros(1, 1, 8), 1)


def test_a_state_of_another_shape_in_a_file_is_refused(tmp_path):
    model = tiny_model("lfm2")
    inject(model, "dense", command_line=EXACT)
    cache = HeteroCache(model)
    answered(model, cache, IDS)
    layer = cache.layers[0]
    layer.conv_states[0] = layer.conv_states[0][:, :, 1:]
    cache.save(tmp_path / "context")
    with pytest.raises(DamagedContextError, match=r"conv_states\.0 is torch\.float32 \[1, 64, 2\].*\[1, 64, 3\]"):
        HeteroCache.load(tmp_path / "context", model)
