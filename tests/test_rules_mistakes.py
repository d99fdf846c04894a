"""The error message of each mistake in a rule file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules.rule_file import parse_rules
from tests.support.rule_texts import error_of, load_error, rule_text, write


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
        ("rules: []\nrules: []\n", ", line 2, column 1: the key 'rules' appears twice, first in line 1"),
        ("rules: !!python/name:os.system\n", ", line 1, column 8: could not determine a constructor"),
        ("rules: \x01", ": not YAML: "),
        ("rules: 2024-99-99", ", line 1, column 8: a value cannot be read as timestamp: month must be in 1..12"),
        ("[" * 5000, ", line 1, column 33: nested more than 32 levels deep"),
    ],
)
def test_invalid_or_unsafe_yaml_is_refused_with_its_place(content: str, expected: str) -> None:
    assert error_of(content).startswith(f"rules.yaml{expected}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ": the file is empty; it must be a mapping with the keys extends, long_context, rules"),
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
        (
            "torch.nn.Linear",
            "is not an operator; name a subclass of hetero_kv.adapter.replacement.Operator",
            "; known: ",
        ),
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
            ", line 3: unknown setting 'generate_device'; known: prefill,",
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
