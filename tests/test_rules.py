"""Rule files: their meaning, and suggestions where a rule matches nothing."""

from __future__ import annotations

import pytest
import yaml
from torch import nn

from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.operators import ChunkedDecoderLayer, RetrievalAttention, SlidingWindowAttention
from hetero_kv.rules.rule_file import nearest_module_paths, parse_rules
from hetero_kv.settings.engine_settings import EngineSettings
from tests.support.rule_texts import rule_text

ATTENTION_RULE = r"""
- match: {name: 'self_attn$'}
  replace:
    class: hetero_kv.operators.RetrievalAttention
    kwargs: {second_select_num: 8, anchor_type: BLOCK_MEAN}
"""

LLAMA_PATHS = [
    "model",
    "model.embed_tokens",
    *(f"model.layers.{layer}{part}" for layer in range(12) for part in ("", ".self_attn", ".self_attn.q_proj", ".mlp")),
    "model.norm",
    "lm_head",
]


class Attention(nn.Module):
    """A module to match by class."""


class SpecialAttention(Attention):
    """A subclass of it."""


# What rules mean


def test_a_rule_holds_its_place_pattern_operator_and_checked_kwargs() -> None:
    (rule,) = parse_rules(f"rules: {ATTENTION_RULE}", "a.yaml").rules
    assert (rule.source, rule.title) == ("a.yaml: rule 1", "a.yaml: rule 1 (RetrievalAttention)")
    assert rule.match_name is not None
    assert (rule.match_name.pattern, rule.match_class) == ("self_attn$", None)
    assert rule.operator is RetrievalAttention
    assert rule.kwargs == {"top_k_blocks": 8, "representative_type": "MEAN"}
    assert rule.recursive


def test_a_bare_list_of_rules_is_a_rule_file() -> None:
    assert parse_rules(ATTENTION_RULE).rules == parse_rules(f"rules: {ATTENTION_RULE}").rules


def test_python_objects_mean_what_their_yaml_means() -> None:
    assert parse_rules(yaml.safe_load(ATTENTION_RULE)).rules == parse_rules(ATTENTION_RULE).rules


def test_an_operator_may_be_named_without_its_module() -> None:
    (rule,) = parse_rules(rule_text(replace="{class: SlidingWindowAttention}")).rules
    assert rule.operator is SlidingWindowAttention


def test_class_default_means_no_operator() -> None:
    (rule,) = parse_rules(rule_text(more="recursive: false")).rules
    assert (rule.operator, rule.operator_name, rule.recursive) == (None, "default", False)


def test_a_name_is_searched_in_the_path_and_anchors_hold() -> None:
    (searched, anchored) = parse_rules(
        [
            {"match": {"name": r"\.\d+\.mlp"}, "replace": {"class": "default"}},
            {"match": {"name": r"^layers\.1$"}, "replace": {"class": "default"}},
        ]
    ).rules
    assert searched.matches("model.layers.3.mlp.up_proj", nn.Linear(1, 1))
    assert not searched.matches("model.layers.mlp", nn.Linear(1, 1))
    assert anchored.matches("layers.1", nn.Linear(1, 1))
    assert not anchored.matches("model.layers.1", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("class_name", "module", "matches"),
    [
        ("Attention", Attention(), True),
        (f"{__name__}.Attention", Attention(), True),
        ("Attention", SpecialAttention(), True),
        ("SpecialAttention", Attention(), False),
        ("elsewhere.Attention", Attention(), False),
        ("torch.nn.Linear", nn.Linear(1, 1), True),
        ("torch.nn.modules.linear.Linear", nn.Linear(1, 1), True),
        ("torch.nn.Linear", nn.Identity(), False),
    ],
)
def test_a_class_matches_its_instances_bare_dotted_or_reexported(
    class_name: str, module: nn.Module, matches: bool
) -> None:
    (rule,) = parse_rules(rule_text(match=f"{{class: {class_name}}}")).rules
    assert rule.matches("any.path", module) is matches


def test_name_and_class_must_both_match() -> None:
    (rule,) = parse_rules(rule_text(match="{name: attn, class: Attention}")).rules
    assert rule.matches("layers.0.attn", Attention())
    assert not rule.matches("layers.0.mlp", Attention())
    assert not rule.matches("layers.0.attn", nn.Identity())


# Settings in force


def test_kwargs_win_over_long_context_and_that_over_the_settings_file() -> None:
    rules = parse_rules(f"long_context: {{block_size: 64, top_k_blocks: 4, chunk_size: 9}}\nrules: {ATTENTION_RULE}")
    settings = rules.operator_settings(rules.rules[0], settings_file={"block_size": 1, "sink_tokens": 3})
    assert settings == RetrievalSettings(block_size=64, top_k_blocks=8, sink_tokens=3, representative_type="MEAN")
    assert rules.engine_settings(settings_file={"chunk_size": 1, "threads_num": 1}) == EngineSettings(9, threads_num=1)


def test_the_command_line_wins_over_all() -> None:
    rules = parse_rules(f"long_context: {{chunk_size: 9}}\nrules: {ATTENTION_RULE}")
    command_line = {"top_k_blocks": 1, "chunk_size": 5}
    assert rules.operator_settings(rules.rules[0], command_line=command_line).top_k_blocks == 1
    assert rules.engine_settings(command_line=command_line).chunk_size == 5


def test_an_operator_without_settings_gets_none() -> None:
    rules = parse_rules(rule_text(replace="{class: ChunkedDecoderLayer}"))
    assert rules.rules[0].operator is ChunkedDecoderLayer
    assert rules.operator_settings(rules.rules[0]) is None


def test_settings_that_exclude_each_other_name_the_rule() -> None:
    rules = parse_rules(f"long_context: {{anchor_num: 2}}\nrules: {ATTENTION_RULE}", "a.yaml")
    with pytest.raises(ConfigError, match=r"^a.yaml: rule 1 \(RetrievalAttention\): representative_num is 2"):
        rules.operator_settings(rules.rules[0])


# Near misses, for rules that match nothing


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        (r"^model\.layers\.\d+\.self_atn$", "model.layers.0.self_attn"),
        (r"^model\.layer\.\d+$", "model.layers.0"),
        (r"^model.layers..*\.attention$", "model.layers.0.self_attn"),
        (r"(^|\.)layers\.[0-9]+\.mpl$", "model.layers.0.mlp"),
        (r"^lm_heads$", "lm_head"),
    ],
)
def test_the_module_path_that_was_meant_is_among_the_nearest(pattern: str, nearest: str) -> None:
    assert nearest in nearest_module_paths(pattern, LLAMA_PATHS)


def test_paths_that_differ_in_their_layer_only_are_named_once() -> None:
    found = nearest_module_paths(r"layers\.\d+\.self_atn", LLAMA_PATHS)
    assert all(".0" in path for path in found)
    assert len(found) == len(set(found)) <= 3


def test_a_pattern_like_no_path_has_no_nearest() -> None:
    assert nearest_module_paths("zzzz", LLAMA_PATHS) == []
