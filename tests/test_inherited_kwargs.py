"""A rule of an extending file starts from the extended file's kwargs for the same module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_kv import eject, inject
from hetero_kv.errors import ConfigError
from hetero_kv.rules.injection import Injection
from hetero_kv.rules.rule_file import load_rules, parse_rules
from tests.support.tiny_models import tiny_model

ATTENTION = "model.layers.{}.self_attn"
_LLAMA = tiny_model("llama", num_hidden_layers=4)


@pytest.fixture
def llama():
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)


def rule(pattern: str, operator: str, **kwargs: Any) -> dict[str, Any]:
    return {"match": {"name": pattern}, "replace": {"class": operator, "kwargs": kwargs}}


def settings_in(injection: Injection, layer: int) -> Any:
    return injection.operators[ATTENTION.format(layer)].settings


def sources_in(injection: Injection, layer: int) -> dict[str, str]:
    return injection.sources[ATTENTION.format(layer)]


def test_a_rule_that_sets_one_thing_keeps_the_method_of_the_file_that_it_extends(llama, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        r"""
extends: quest.yaml
rules:
  - match: {name: '\.layers\.[01]\.self_attn$'}
    replace: {class: hetero_kv.operators.RetrievalAttention, kwargs: {top_k_blocks: all}}
"""
    )
    injection = inject(llama, tmp_path / "mine.yaml")
    for layer in range(4):
        settings = settings_in(injection, layer)
        assert (settings.representative_type, settings.representative_num) == ("QUEST", 2)
        assert (settings.head_select_mode, settings.dense_layer_num) == ("SEPARATE", 2)
        assert settings.top_k_blocks == ("all" if layer < 2 else 256)
    mine = str(tmp_path / "mine.yaml")
    assert sources_in(injection, 0)["top_k_blocks"] == f"{mine}: rule 1"
    assert sources_in(injection, 0)["representative_type"] == "injection_rules/quest.yaml: rule 1"
    assert sources_in(injection, 0)["block_size"] == "injection_rules/quest.yaml: long_context"
    assert sources_in(injection, 0)["token_step"] == "default"
    assert sources_in(injection, 2)["top_k_blocks"] == "injection_rules/quest.yaml: long_context"


def test_the_rules_in_the_readme_do_as_it_says():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    rules = parse_rules(readme.split("```yaml\n")[1].split("```")[0], "readme.yaml")
    injection = inject(tiny_model("llama", num_hidden_layers=9), rules)
    found = [settings_in(injection, layer) for layer in range(9)]
    assert {(each.representative_type, each.head_select_mode, each.block_size) for each in found} == {
        ("QUEST", "SEPARATE", 16)
    }
    assert [each.top_k_blocks for each in found] == [*[256] * 4, *["all"] * 4, 256]
    assert {each.local_windows_len for each in found} == {2048}


def test_each_module_has_the_kwargs_that_the_extended_rules_give_that_very_module(llama, tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        r"""
extends: ktransformers.yaml
rules:
  - match: {name: 'layers\.0\.self_attn$'}
    replace: {class: RetrievalAttention, kwargs: {representative_type: MAX}}
  - match: {name: 'self_attn$'}
    replace: {class: RetrievalAttention, kwargs: {representative_type: MEAN, token_step: 3}}
"""
    )
    child = {"extends": str(tmp_path / "base.yaml"), "rules": [rule("self_attn$", "RetrievalAttention", layer_step=2)]}
    injection = inject(llama, parse_rules(child))
    found = [settings_in(injection, layer) for layer in range(4)]
    assert [settings.representative_type for settings in found] == ["MAX", "MEAN", "MEAN", "MEAN"]
    assert [settings.token_step for settings in found] == [1, 3, 3, 3]
    assert {settings.layer_step for settings in found} == {2}


def test_of_a_chain_of_files_the_nearest_wins_and_the_farther_fill_in(llama, tmp_path: Path):
    (tmp_path / "parent.yaml").write_text(
        "extends: quest.yaml\n"
        "rules: [{match: {name: 'self_attn$'}, replace: {class: RetrievalAttention, kwargs: {dense_layer_num: 1}}}]"
    )
    child = {
        "extends": str(tmp_path / "parent.yaml"),
        "rules": [rule(r"\.3\.self_attn$", "RetrievalAttention", kv_type="FP32")],
    }
    settings = settings_in(inject(llama, parse_rules(child)), 3)
    assert (settings.kv_type, settings.dense_layer_num, settings.representative_type) == ("FP32", 1, "QUEST")


def test_kwargs_of_another_operator_class_are_not_inherited(llama):
    child = {"extends": "shadowkv.yaml", "rules": [rule("self_attn$", "BoundedAttention", policy="tova")]}
    assert set(sources_in(inject(llama, parse_rules(child)), 0).values()) == {"rules: rule 1", "default"}


def test_a_rule_without_a_policy_has_that_of_the_extended_file(llama):
    child = {"extends": "cascade.yaml", "rules": [rule(r"layers\.1\.self_attn$", "BoundedAttention", budget=300)]}
    injection = inject(llama, parse_rules(child))
    settings = settings_in(injection, 1)
    assert (settings.policy, settings.budget, settings.sink_tokens) == ("cascade", 300, 64)
    assert sources_in(injection, 1)["policy"] == "injection_rules/cascade.yaml: rule 1"
    assert settings_in(injection, 0).budget == 2048


def test_a_rule_of_another_policy_inherits_the_kwargs_that_it_accepts(llama, tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        "extends: pyramidkv.yaml\n"
        "rules: [{match: {name: 'self_attn$'}, replace: {class: BoundedAttention, kwargs: {budget: 777}}}]"
    )
    child = {"extends": str(tmp_path / "base.yaml"), "rules": [rule("self_attn$", "BoundedAttention", policy="d2o")]}
    settings = settings_in(inject(llama, parse_rules(child)), 0)
    # `beta` is pyramidkv's steepness, 20, which is no weight.
    assert (settings.policy, settings.budget, settings.beta) == ("d2o", 777, 0.7)


def test_a_setting_that_the_inherited_policy_lacks_is_an_error_of_the_rule(llama):
    child = """
extends: cascade.yaml
rules:
  - match: {name: self_attn$}
    replace: {class: BoundedAttention, kwargs: {recent_tokens: 3}}
"""
    with pytest.raises(ConfigError) as raised:
        inject(llama, parse_rules(child, "mine.yaml"))
    assert str(raised.value) == (
        "mine.yaml: rule 1: kwargs, line 5: recent_tokens has no effect here: it is a setting of BoundedAttention "
        "(pyramidkv, roco and snapkv), and the rule injects BoundedAttention (cascade)"
    )


def test_a_flag_switches_the_policy_and_the_rules_kwargs_that_it_lacks_are_left_out(llama):
    injection = inject(llama, "cascade", command_line={"policy": "tova", "budget": 99})
    settings = settings_in(injection, 0)
    assert (settings.policy, settings.budget, settings.stride) == ("tova", 99, 4096)
    assert sources_in(injection, 0)["policy"] == "command line"
    eject(llama)
    inject(llama, parse_rules("extends: cascade.yaml\nlong_context: {gamma: 0.5}"), command_line={"policy": "tova"})
    eject(llama)
    with pytest.raises(ConfigError, match="command line: gamma has no effect here: it is a setting of Bou"):
        inject(llama, "cascade", command_line={"policy": "tova", "gamma": 0.5})


def test_files_that_are_extended_side_by_side_give_their_kwargs_in_order(llama, tmp_path: Path):
    for name, kwargs in (("a", "{token_step: 2}"), ("b", "{token_step: 9, layer_step: 2}")):
        (tmp_path / f"{name}.yaml").write_text(
            "extends: ktransformers.yaml\n"
            f"rules: [{{match: {{name: 'self_attn$'}}, replace: {{class: RetrievalAttention, kwargs: {kwargs}}}}}]"
        )
    (tmp_path / "c.yaml").write_text(
        "extends: [a.yaml, b.yaml]\n"
        "rules: [{match: {name: 'self_attn$'}, replace: {class: RetrievalAttention, kwargs: {kv_type: FP32}}}]"
    )
    settings = settings_in(inject(llama, load_rules(tmp_path / "c.yaml")), 0)
    assert (settings.token_step, settings.layer_step, settings.kv_type) == (2, 2, "FP32")
