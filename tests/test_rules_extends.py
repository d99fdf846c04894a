"""Rule files that extend others: precedence of rules and settings, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_kv.rules.rule_file import RuleSet, load_rules
from tests.support.rule_texts import load_error, rule_text, write


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


def test_a_file_in_the_childs_folder_precedes_the_packaged_one(tmp_path: Path) -> None:
    write(tmp_path / "ktransformers.yaml", rule_text())
    assert operators_of(load_rules(write(tmp_path / "child.yaml", "extends: ktransformers.yaml"))) == ["default"]


def test_a_circular_extends_shows_the_chain(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write(a, "extends: b.yaml")
    write(b, "extends: a.yaml")
    start = write(tmp_path / "start.yaml", "extends: a.yaml")
    assert load_error(start) == f"{b}: extends: circular: {a} -> {b} -> {a}; remove one of these"


def test_a_file_that_extends_itself_is_circular(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yaml", "extends: a.yaml")
    assert f"circular: {a} -> {a}" in load_error(a)


def test_a_missing_parent_is_named_with_the_nearest_recipe(tmp_path: Path) -> None:
    child = write(tmp_path / "a.yaml", "\nextends: ktransformer.yaml")
    text = load_error(child)
    assert text.startswith(
        f"{child}, line 2: extends: there is no 'ktransformer.yaml' in the folder of {child} or in the package"
    )
    assert "did you mean ktransformers?" in text


def test_a_mistake_in_a_parent_names_the_parent(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "rules:\n  - replace: {class: default}\n")
    child = write(tmp_path / "child.yaml", "extends: base.yaml")
    assert load_error(child) == f"{base}: rule 1, line 2: no 'match'; a rule needs match and replace"
