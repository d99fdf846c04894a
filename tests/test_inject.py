"""Injection and ejection, and their refusals."""

from __future__ import annotations

import pytest

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.operators import RetrievalAttention, SlidingWindowAttention
from hetero_kv.rules.matching import InjectionError
from hetero_kv.rules.rule_file import parse_rules
from tests.support.block_rules import rule, rules
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model


@pytest.fixture
def llama():
    return tiny_model("llama")


def snapshot(model):
    return {path: (id(module), id(getattr(module, "config", None))) for path, module in model.named_modules()}


def test_eject_restores_every_module_config_and_weight(llama):
    before, keys = snapshot(llama), list(llama.state_dict())
    config, implementation = llama.config, llama.config._attn_implementation
    inject(llama, rules())
    assert snapshot(llama) != before
    eject(llama)
    assert snapshot(llama) == before
    assert list(llama.state_dict()) == keys
    assert llama.config is config
    assert config._attn_implementation == implementation


def test_the_report_tells_operator_and_settings_of_each_module(llama):
    report = inject(llama, rules(rule(r"layers\.1\.self_attn$", "RetrievalAttention", block_size=8))).report()
    assert report["model.layers.0"][0] == "ChunkedDecoderLayer"
    assert report["model.layers.0.self_attn"][0] == "RetrievalAttention"
    assert [report[f"model.layers.{i}.self_attn"][1].block_size for i in range(3)] == [4, 8, 4]


def test_settings_come_from_the_command_line_before_the_rules_before_the_settings_file(llama):
    injection = inject(
        llama,
        rules(),
        command_line={"block_size": 2},
        settings_file={"block_size": 32, "local_windows_len": 99, "top_k_blocks": 12},
    )
    settings = injection.operators["model.layers.0.self_attn"].settings
    assert (settings.block_size, settings.local_windows_len, settings.top_k_blocks) == (2, 8, 96)


@pytest.mark.parametrize("recipe", ["shadowkv", "streaming_llm"])
def test_attend_on_gpu_is_refused_where_no_operator_reads_it(llama, recipe):
    with pytest.raises(ConfigError, match=r"attend_on is gpu, but .* injects no RetrievalAttention.*set attend_on"):
        inject(llama, small_recipe(recipe, attend_on="gpu"))
    inject(llama, small_recipe(recipe, attend_on="cpu"))


def test_a_models_own_sliding_layers_get_the_window_operator():
    gemma = tiny_model("gemma3_text")
    injection = inject(gemma, rules())
    kinds = [type(injection.operators[f"model.layers.{i}.self_attn"]) for i in range(3)]
    assert kinds == [SlidingWindowAttention, RetrievalAttention, SlidingWindowAttention]
    assert [type(layer) for layer in HeteroCache(gemma).layers] == [WindowLayer, RetrievalLayer, WindowLayer]


def test_attributes_of_a_replaced_module_are_passed_on(llama):
    head_dim = llama.model.layers[0].self_attn.head_dim
    inject(llama, rules())
    assert llama.model.layers[0].self_attn.head_dim == head_dim
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = llama.model.layers[0].self_attn.no_such_thing


def test_injecting_twice_is_an_error_and_so_is_ejecting_twice(llama):
    inject(llama, rules())
    with pytest.raises(InjectionError, match=r"injected already; call hetero_kv\.eject"):
        inject(llama, rules())
    eject(llama)
    with pytest.raises(InjectionError, match="nothing to eject"):
        eject(llama)


def test_a_rule_that_matches_nothing_names_the_nearest_module(llama):
    before = snapshot(llama)
    with pytest.raises(InjectionError, match=r"rule 1 .*self_atn.* matches no module.*model\.layers\.0\.self_attn"):
        inject(llama, rules(rule(r"layers\.\d+\.self_atn$", "RetrievalAttention")))
    assert snapshot(llama) == before


def test_a_module_that_is_no_attention_is_refused_with_the_reason(llama):
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp \(LlamaMLP\) cannot be replaced: its att"):
        inject(llama, rules(rule(r"layers\.0\.mlp$", "RetrievalAttention")))


def test_a_chunked_layer_needs_one_attention(llama):
    with pytest.raises(UnsupportedModelError, match=r"model\.layers \(ModuleList\) has 3 modules with a layer_idx"):
        inject(llama, rules(rule(r"model\.layers$", "ChunkedDecoderLayer")))


def test_a_full_attention_layer_has_no_window_operator(llama):
    with pytest.raises(UnsupportedModelError, match="full attention in this model"):
        inject(llama, rules(rule(r"layers\.0\.self_attn$", "SlidingWindowAttention")))


def test_an_attention_left_alone_in_an_unchunked_layer_is_refused(llama):
    left = [rule(r"layers\.2$", "default"), rule(r"layers\.2\.self_attn$", "default")]
    with pytest.raises(InjectionError, match=r"model\.layers\.2\.self_attn .* is not replaced"):
        inject(llama, rules(*left))


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("falcon", {"num_hidden_layers": 1, "num_attention_heads": 4}),
        ("bloom", {"n_layer": 1, "n_head": 4}),
    ],
)
def test_models_without_the_attention_interface_are_refused_by_name(model_type, sizes):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, hidden_size=32, vocab_size=97, **sizes))
    only = parse_rules({"rules": [rule(r"self_attention$", "RetrievalAttention")]})
    with pytest.raises(UnsupportedModelError, match=r"Attention\) cannot be replaced: .* attention interface"):
        inject(model, only)


def test_an_injection_that_fails_half_way_leaves_the_model_as_it_was(llama, monkeypatch):
    before = snapshot(llama)
    with pytest.raises(HeteroKVError, match="top_k_blocks lists 2 numbers, but the model has 3 layers"):
        inject(llama, rules(top_k_blocks=[1, 2]))
    assert snapshot(llama) == before
    build, built = RetrievalAttention.__init__, []

    def failing(self, *args):
        build(self, *args)
        built.append(self)
        if len(built) == 2:
            raise MemoryError

    monkeypatch.setattr(RetrievalAttention, "__init__", failing)
    with pytest.raises(MemoryError):
        inject(llama, rules())
    assert snapshot(llama) == before


def test_a_setting_that_kwargs_of_an_extended_file_overrule_is_refused(tmp_path):
    model, path = tiny_model("llama"), tmp_path / "mine.yaml"
    path.write_text("extends: h2o.yaml\nlong_context:\n  budget: 40\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: long_context, line 3: budget has no effect here: .*h2o.yaml: r"):
        inject(model, path)
    # A flag counts for more than both.
    inject(model, path, command_line={"budget": 60})
    eject(model)


@pytest.mark.parametrize(
    ("operator", "name", "said"),
    [
        ("ChunkedModule", "self_attn$", r"rule 1 \(ChunkedModule\): .*self_attn \(LlamaAttention\) is attention"),
        ("RetrievalAttention", "mlp$", r"rule 1 \(RetrievalAttention\): model.layers.0.mlp \(LlamaMLP\) cannot be"),
    ],
)
def test_invalid_kwargs_of_an_operator_are_refused_with_the_rule(operator, name, said):
    with pytest.raises(UnsupportedModelError, match=said):
        inject(tiny_model("llama"), parse_rules({"rules": [rule(name, operator)]}))


def test_a_list_of_another_length_is_refused_with_the_rule():
    with pytest.raises(ConfigError, match=r"rule 2 \(RetrievalAttention\): top_k_blocks lists 2 numbers, but"):
        inject(tiny_model("llama"), rules(top_k_blocks=[1, 2]))
