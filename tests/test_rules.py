"""Rule files: what they mean, and what each mistake in one is answered with."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.operators import ChunkedDecoderLayer, RetrievalAttention, SlidingWindowAttention
from hetero_kv.rules import recipes
from hetero_kv.rules.rule_file import RuleSet, load_rules, nearest_module_paths, parse_rules
from hetero_kv.settings.engine_settings import EngineSettings

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


def rule_text(match: str = "{name: x}", replace: str = "{class: default}", more: str = "") -> str:
    return f"rules:\n  - match: {match}\n    replace: {replace}\n    {more}\n"


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def error_of(content: Any, source: str = "rules.yaml", trust_rules: Collection[str] = ()) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_rules(content, source, trust_rules)
    return str(raised.value)


def load_error(path: Path | str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_rules(path)
    return str(raised.value)


# What rules mean


def test_a_rule_holds_its_place_pattern_operator_and_checked_kwargs() -> None:
    (rule,) = parse_rules(f"rules: {ATTENTION_RULE}", "a.yaml").rules
    assert (rule.source, rule.title) == ("a.yaml: rule 1", "a.yaml: rule 1 (RetrievalAttention)")
    assert rule.match_name is not None
    assert (rule.match_name.pattern, rule.match_class) == ("self_attn$", None)
    assert rule.operator is RetrievalAttention
    assert rule.kwargs == {"second_block_count": 8, "representative_type": "MEAN"}
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
    rules = parse_rules(
        f"long_context: {{block_size: 64, second_block_count: 4, chunk_size: 9}}\nrules: {ATTENTION_RULE}"
    )
    settings = rules.operator_settings(rules.rules[0], settings_file={"block_size": 1, "initial_len": 3})
    assert settings == RetrievalSettings(block_size=64, second_block_count=8, initial_len=3, representative_type="MEAN")
    assert rules.engine_settings(settings_file={"chunk_size": 1, "threads_num": 1}) == EngineSettings(9, threads_num=1)


def test_the_command_line_wins_over_all() -> None:
    rules = parse_rules(f"long_context: {{chunk_size: 9}}\nrules: {ATTENTION_RULE}")
    command_line = {"second_block_count": 1, "chunk_size": 5}
    assert rules.operator_settings(rules.rules[0], command_line=command_line).second_block_count == 1
    assert rules.engine_settings(command_line=command_line).chunk_size == 5


def test_an_operator_without_settings_gets_none() -> None:
    rules = parse_rules(rule_text(replace="{class: ChunkedDecoderLayer}"))
    assert rules.rules[0].operator is ChunkedDecoderLayer
    assert rules.operator_settings(rules.rules[0]) is None


def test_settings_that_exclude_each_other_name_the_rule() -> None:
    rules = parse_rules(f"long_context: {{anchor_num: 2}}\nrules: {ATTENTION_RULE}", "a.yaml")
    with pytest.raises(ConfigError, match=r"^a.yaml: rule 1 \(RetrievalAttention\): representative_num is 2"):
        rules.operator_settings(rules.rules[0])


# extends


def operators_of(rules: RuleSet) -> list[str]:
    return [rule.operator_name for rule in rules.rules]


def test_a_childs_rules_come_first_and_its_settings_win(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "long_context: {chunk_size: 1, block_size: 2}\n" + rule_text())
    child = write(
        tmp_path / "child.yaml",
        "extends: base.yaml\nlong_context: {chunk_size: 7}\n" + rule_text(replace="{class: RetrievalAttention}"),
    )
    rules = load_rules(child)
    assert rules.path == child
    assert operators_of(rules) == ["RetrievalAttention", "default"]
    assert rules.long_context == {"chunk_size": 7, "block_size": 2}
    assert [rule.source for rule in rules.rules] == [f"{child}: rule 1", f"{tmp_path / 'base.yaml'}: rule 1"]


def test_of_two_files_that_are_extended_the_first_wins(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "long_context: {chunk_size: 1}\n" + rule_text())
    write(tmp_path / "b.yaml", "long_context: {chunk_size: 2}\n" + rule_text(replace="{class: RetrievalAttention}"))
    rules = load_rules(write(tmp_path / "c.yaml", "extends: [a.yaml, b.yaml]"))
    assert operators_of(rules) == ["default", "RetrievalAttention"]
    assert rules.long_context == {"chunk_size": 1}


def test_a_file_that_is_extended_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", rule_text())
    write(tmp_path / "a.yaml", "extends: base.yaml\n")
    write(tmp_path / "b.yaml", "extends: base.yaml\n")
    assert len(load_rules(write(tmp_path / "c.yaml", "extends: [a.yaml, b.yaml]")).rules) == 1


@pytest.mark.parametrize("name", ["ktransformers", "ktransformers.yaml", "injection_rules/ktransformers.yaml"])
def test_a_packaged_recipe_is_found_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert operators_of(load_rules(name)) == [
        "hetero_kv.operators.ChunkedDecoderLayer",
        "hetero_kv.operators.RetrievalAttention",
        "hetero_kv.operators.ChunkedModule",
        "hetero_kv.operators.QuantizedLinear",
        "hetero_kv.operators.QuantizedExperts",
        "hetero_kv.operators.QuantizedEmbedding",
    ]
    child = write(tmp_path / "mine.yaml", f"extends: {name}\n")
    assert load_rules(child).rules == load_rules(name).rules


def test_a_file_beside_the_child_goes_before_the_packaged_one(tmp_path: Path) -> None:
    write(tmp_path / "ktransformers.yaml", rule_text())
    assert operators_of(load_rules(write(tmp_path / "child.yaml", "extends: ktransformers.yaml"))) == ["default"]


def test_a_circular_extends_shows_the_chain(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write(a, "extends: b.yaml")
    write(b, "extends: a.yaml")
    start = write(tmp_path / "start.yaml", "extends: a.yaml")
    assert load_error(start) == f"{b}: extends: circular: {a} -> {b} -> {a}; take one of these out"


def test_a_file_that_extends_itself_is_circular(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yaml", "extends: a.yaml")
    assert f"circular: {a} -> {a}" in load_error(a)


def test_a_missing_parent_is_named_with_the_nearest_recipe(tmp_path: Path) -> None:
    child = write(tmp_path / "a.yaml", "\nextends: ktransformer.yaml")
    text = load_error(child)
    assert text.startswith(
        f"{child}, line 2: extends: there is no 'ktransformer.yaml' beside {child} or in the package"
    )
    assert "did you mean ktransformers?" in text


def test_a_mistake_in_a_parent_names_the_parent(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "rules:\n  - replace: {class: default}\n")
    child = write(tmp_path / "child.yaml", "extends: base.yaml")
    assert load_error(child) == f"{base}: rule 1, line 2: no 'match'; a rule needs match and replace"


# Mistakes


def test_a_missing_file_is_answered_with_the_recipes() -> None:
    text = load_error("injection_rules/ktransfomers.yaml")
    assert text.startswith("there is no rules file 'injection_rules/ktransfomers.yaml'; did you mean ktransformers?")
    assert "dense" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("rules:\n  - match: {name: x\n", ", line 3, column 1: while parsing a flow mapping"),
        ("rules:\n\t- match\n", ", line 2, column 1: while scanning for the next token"),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: expected a single document in the stream"),
        ("rules: []\nrules: []\n", ", line 2, column 1: the key 'rules' is given twice, first in line 1"),
        ("rules: !!python/name:os.system\n", ", line 1, column 8: could not determine a constructor"),
        ("rules: \x01", ": not YAML: "),
        ("rules: 2024-99-99", ", line 1, column 8: a value cannot be read as timestamp: month must be in 1..12"),
        ("[" * 5000, ", line 1, column 33: nested more than 32 levels deep"),
    ],
)
def test_what_is_not_yaml_or_not_safe_is_refused_with_its_place(content: str, expected: str) -> None:
    assert error_of(content).startswith(f"rules.yaml{expected}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ": the file is None; it must be a mapping with the keys extends, long_context, rules"),
        ("just text", ": the file is 'just text'; it must be a mapping with the keys"),
        ("rules: {match: x}", ", line 1: rules is {'match': 'x'}; it must be a list of rules"),
        ("rule: []", ", line 1: unknown key 'rule'; did you mean rules?"),
        ("long_context: {chunk_size: 1}", ": no rules; give `rules:`, or `extends: ktransformers.yaml`"),
        ("extends: 3", ", line 1: extends is 3; it must be a file name or a list of file names"),
        (
            "long_context:\n  chunk_sise: 1",
            ": long_context, line 2: unknown setting 'chunk_sise'; did you mean chunk_size?",
        ),
        ("long_context:\n  chunk_size: 0", ": long_context, line 2: chunk_size is 0; it must be a whole number of at"),
        ("long_context: [1]", ": long_context: [1] is not a mapping; write `key: value` pairs"),
    ],
)
def test_a_mistake_in_a_file_names_line_and_key(content: str, expected: str) -> None:
    assert error_of(content).startswith(f"rules.yaml{expected}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- text", ": a rule is 'text'; it must be a mapping with the keys match, replace, recursive, optional"),
        ("- match: {name: x}", ", line 1: no 'replace'; a rule needs match and replace"),
        (rule_text(more="recursiv: true"), ", line 4: unknown key 'recursiv'; did you mean recursive?"),
        (rule_text(more="recursive: 'no'"), ", line 4: recursive is 'no'; it must be true or false"),
        (rule_text(more="optional: 1"), ", line 4: optional is 1; it must be true or false"),
    ],
)
def test_a_mistake_in_a_rule_names_rule_line_and_key(content: str, expected: str) -> None:
    assert error_of(content).startswith(f"rules.yaml: rule 1{expected}")


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("{}", ", line 2: give name, class, or both"),
        ("x", ": match is 'x'; it must be a mapping with the keys name, class"),
        ("{nam: x}", ", line 2: unknown key 'nam'; did you mean name?"),
        ("{name: 3}", ", line 2: name is 3; it must be text"),
        ("{class: ''}", ", line 2: class is ''; it must be text"),
        (r"{name: 'a\.(0'}", r", line 2: name 'a\.(0' is not a regular expression: missing ), unterminated subpattern"),
    ],
)
def test_a_mistake_in_match_names_rule_line_and_key(match: str, expected: str) -> None:
    assert error_of(rule_text(match=match)).startswith(f"rules.yaml: rule 1: match{expected}")


@pytest.mark.parametrize(
    ("replace", "expected"),
    [
        ("default", ": replace is 'default'; it must be a mapping with the keys class, kwargs"),
        ("{clas: x}", ", line 3: unknown key 'clas'; did you mean class?"),
        ("{kwargs: {}}", ", line 3: class is None; it must be an operator's name, or default"),
        ("{class: [RetrievalAttention]}", ", line 3: class is ['RetrievalAttention']; it must be an operator's name"),
    ],
)
def test_a_mistake_in_replace_names_rule_line_and_key(replace: str, expected: str) -> None:
    assert error_of(rule_text(replace=replace)).startswith(f"rules.yaml: rule 1: replace{expected}")


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        (
            "hetero_kv.operators.RetrivalAttention",
            "cannot be imported (module 'hetero_kv.operators' has no attribute 'RetrivalAttention')",
            "; did you mean hetero_kv.operators.RetrievalAttention?",
        ),
        ("RetrivalAttention", "cannot be imported (module", "; did you mean RetrievalAttention?"),
        ("Default", "cannot be imported (module", "; did you mean default?"),
        ("ktransformers.operators.KLlamaModel", "cannot be imported (No module named 'ktransformers')", "; "),
        ("nowhere.Thing", "cannot be imported (No module named 'nowhere')", "; known: default, hetero_kv.operators."),
        (".x", "cannot be imported (", "; known: default"),
        ("torch.nn.Linear", "is not an operator; name a subclass of hetero_kv.adapter.operator.Operator", "; known: "),
        ("os.getcwd", "is not an operator", "; known: default"),
        ("hetero_kv.operators.Operator", "is not an operator", "; did you mean hetero_kv.operators."),
        ("hetero_kv.operators.AttentionOperator", "is not an operator", "; did you mean hetero_kv.operators."),
    ],
)
def test_a_class_that_is_no_operator_is_named_with_the_nearest_that_is(name: str, reason: str, remedy: str) -> None:
    trusted = ["ktransformers", "nowhere", "torch.nn", "os"]
    text = error_of(rule_text(replace=f"{{class: {name}}}"), trust_rules=trusted)
    assert text.startswith(f"rules.yaml: rule 1: replace, line 3: class '{name}' {reason}")
    assert remedy in text


@pytest.mark.parametrize(
    ("operator", "kwargs", "expected"),
    [
        ("RetrievalAttention", "{blok_size: 1}", ", line 3: unknown setting 'blok_size'; did you mean block_size?"),
        (
            "RetrievalAttention",
            "{generate_device: cpu}",
            ", line 3: unknown setting 'generate_device'; known: block_size",
        ),
        ("RetrievalAttention", "{kv_type: FP8}", ", line 3: kv_type is 'FP8'; it must be FP16"),
        ("RetrievalAttention", "{block_size: '8'}", ", line 3: block_size is '8'; it must be a whole number"),
        ("RetrievalAttention", "[1]", ": [1] is not a mapping; write `key: value` pairs"),
        ("ChunkedDecoderLayer", "{chunk: 1}", ", line 3: unknown setting 'chunk'; there are no settings here"),
        ("default", "{block_size: 1}", ", line 3: unknown setting 'block_size'; there are no settings here"),
    ],
)
def test_a_mistake_in_kwargs_names_rule_operator_line_and_key(operator: str, kwargs: str, expected: str) -> None:
    text = error_of(rule_text(replace=f"{{class: {operator}, kwargs: {kwargs}}}"))
    assert text.startswith(f"rules.yaml: rule 1 ({operator}): kwargs{expected}")


def test_the_number_of_a_rule_is_its_place_in_the_file() -> None:
    good = {"match": {"name": "x"}, "replace": {"class": "default"}}
    assert error_of([good, good, {"match": {"name": "("}, "replace": {"class": "default"}}]).startswith(
        "rules.yaml: rule 3: match: name '(' is not a regular expression"
    )


def test_an_operator_module_that_fails_while_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "broken_operator.py", "raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    text = error_of(rule_text(replace="{class: broken_operator.Mine}"), trust_rules=["broken_operator"])
    assert "class 'broken_operator.Mine' cannot be imported (no licence)" in text


def test_an_operator_of_the_users_own_module_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path / "own_operator.py",
        "from hetero_kv.operators import RetrievalAttention\nclass Mine(RetrievalAttention):\n    pass\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = rule_text(replace="{class: own_operator.Mine, kwargs: {block_size: 4}}")
    (rule,) = parse_rules(text, trust_rules=["own_operator"]).rules
    assert rule.operator is not None
    assert issubclass(rule.operator, RetrievalAttention)
    assert rule.kwargs == {"block_size": 4}


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


# The files that ship


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_file_loads_and_its_settings_agree(name: str) -> None:
    rules = load_rules(name)
    rules.engine_settings()
    attention = [rules.operator_settings(rule) for rule in rules.rules if rule.operator is RetrievalAttention]
    assert attention
    assert all(isinstance(settings, RetrievalSettings) for settings in attention)


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_file_opens_with_what_it_is(name: str) -> None:
    path = recipes.find(name, Path())
    assert path is not None
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_ktransformers_recipe_is_the_base_configuration_of_the_article() -> None:
    rules = load_rules("ktransformers")
    assert rules.engine_settings().chunk_size == 4096
    assert rules.operator_settings(rules.rules[1]) == RetrievalSettings(
        block_size=128, local_windows_len=4096, second_block_count=96, representative_type="DYNAMIC", kv_type="FP16"
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
    assert dense.long_context == {**base.long_context, "second_block_count": "all"}
    assert dense.operator_settings(dense.rules[1]).second_block_count == "all"


@pytest.mark.parametrize("name", ["laptop-16gb", "workstation-128gb", "gpu-24gb"])
def test_machine_settings_keep_the_rules_and_bound_the_store(name: str) -> None:
    rules = load_rules(name)
    assert rules.rules == load_rules("ktransformers").rules
    assert rules.engine_settings().max_seq_len != "auto"
