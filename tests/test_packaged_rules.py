"""The packaged rule files."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules import recipes
from hetero_kv.rules.rule_file import load_rules


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_file_loads_and_its_settings_agree(name: str) -> None:
    rules = load_rules(name)
    rules.engine_settings()
    attention = [rules.operator_settings(rule) for rule in rules.rules if rule.operator is RetrievalAttention]
    assert attention
    assert all(isinstance(settings, RetrievalSettings) for settings in attention)


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_file_begins_with_its_description(name: str) -> None:
    path = recipes.find(name, Path())
    assert path is not None
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_ktransformers_recipe_is_the_base_configuration_of_the_article() -> None:
    rules = load_rules("ktransformers")
    assert rules.engine_settings().chunk_size == 4096
    assert rules.operator_settings(rules.rules[1]) == RetrievalSettings(
        block_size=128, local_windows_len=4096, top_k_blocks=96, representative_type="DYNAMIC", kv_type="FP16"
    )


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("model.layers.0", 0),
        ("gpt_neox.layers.11", 0),
        ("model.language_model.layers.3", 0),
        ("model.layers.0.self_attn", 1),
        ("gpt_neox.layers.11.attention", 1),
        ("model.layers.0.self_attn.q_proj", None),
        ("model.layers.0.mlp", None),
        ("model.layers.0.mlp.experts.3", None),
        ("model.sublayers.0", None),
        ("model.layers", None),
    ],
)
def test_the_ktransformers_recipe_matches_decoder_layers_and_their_attention(path: str, rule: int | None) -> None:
    rules = load_rules("ktransformers").rules
    matching = [number for number, each in enumerate(rules) if each.matches(path, nn.Identity())]
    assert matching == ([] if rule is None else [rule])


def test_the_dense_recipe_is_the_ktransformers_recipe_that_attends_to_every_block() -> None:
    dense, base = load_rules("dense"), load_rules("ktransformers")
    assert dense.rules == base.rules
    assert dense.long_context == {**base.long_context, "top_k_blocks": "all"}
    assert dense.operator_settings(dense.rules[1]).top_k_blocks == "all"


@pytest.mark.parametrize("name", ["laptop-16gb", "workstation-128gb", "gpu-24gb", "gpu-24gb-1m"])
def test_machine_settings_keep_the_rules_and_bound_the_store(name: str) -> None:
    rules = load_rules(name)
    assert rules.rules == load_rules("ktransformers").rules
    assert rules.engine_settings().max_seq_len != "auto"
