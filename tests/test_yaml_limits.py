"""Rules and settings that are too large, too deep or malformed are refused by name, and quickly."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml
from torch import nn

from hetero_kv.errors import LONGEST_TEXT, ConfigError, HeteroKVError
from hetero_kv.rules.injecting import inject
from hetero_kv.rules.module_pattern import MOST_CHARACTERS, ModulePattern
from hetero_kv.rules.rule_file import load_rules, parse_rules
from hetero_kv.rules.settings_file import ensure_settings_file, read_settings_file, settings_text
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.located_yaml import MOST_BYTES, parse_yaml
from hetero_kv.settings.mapping import settings_from_mapping
from hetero_kv.settings.setting import LARGEST

ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
# Without the limit each level would take twice as long as the one before.
MERGES = "- &m0 {k0: 0}\n" + "".join(f"- &m{n} {{<<: [*m{n - 1}, *m{n - 1}], k{n}: 0}}\n" for n in range(1, 16))

BOMBS = {
    "aliases": (ALIASES, "more than 10,000 values, counting those of aliases each time"),
    "merge keys": (MERGES, "more than 10,000 values, counting those of aliases each time"),
    "a list": ("[" + "1," * 20_000 + "1]", "more than 10,000 values"),
    "depth": ("- " * 50 + "x", "nested more than 32 levels deep"),
    "flow depth": ("{a: " * 50 + "x" + "}" * 50, "nested more than 32 levels deep"),
    "an alias of itself": ("a: &a [*a]", "an alias refers to a value that contains it"),
    "a mapping that merges itself": ("&a\n<<: *a\n", "an alias refers to a value that contains it"),
    "a comment": ("#" * MOST_BYTES + "\na: 1", "longer than 256 KiB"),
    "digits": ("a: " + "1" * 1_000_000, "longer than 256 KiB"),
    "fewer digits": ("a: " + "1" * 5000, "a value cannot be read as int: it has 5,000 characters"),
    "hexadecimal digits": ("a: 0x" + "f" * 200_000, "a value cannot be read as int"),
    "sexagesimal digits": ("a: 1" + ":59" * 60_000, "a value cannot be read as int"),
    "digits of a fraction": ("a: 1." + "1" * 5000, "a value cannot be read as float"),
}


@pytest.mark.parametrize("text", BOMBS)
def test_a_bomb_is_refused(text):
    bomb, expected = BOMBS[text]
    with pytest.raises(ConfigError) as raised:
        parse_yaml(bomb, "mine.yaml")
    assert str(raised.value).startswith("mine.yaml")
    assert expected in str(raised.value)
    assert len(str(raised.value)) <= LONGEST_TEXT


def test_a_bomb_in_a_file_is_not_read_whole(tmp_path):
    for rules in (tmp_path / "comment.yaml", Path("/dev/zero")):
        if rules.parent == tmp_path:
            rules.write_bytes(b"#" * (MOST_BYTES + 1))
        with pytest.raises(ConfigError, match="longer than 256 KiB"):
            read_settings_file(rules)


def test_real_rules_and_settings_are_far_within_the_limits():
    assert len(settings_text()) * 4 < MOST_BYTES
    rules = [{"match": {"name": f"x{n}"}, "replace": {"class": "default"}} for n in range(300)]
    text = "rules:\n" + "".join(f"- {{match: {{name: x{n}}}, replace: {{class: default}}}}\n" for n in range(300))
    assert parse_yaml(text, "mine.yaml") == {"rules": rules}
    shared = "- &a {k: 1}\n" + "- {<<: *a, l: 2}\n" * 300
    assert parse_yaml(shared, "mine.yaml") == [{"k": 1}, *[{"k": 1, "l": 2}] * 300]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("!!timestamp x", "line 2, column 5: a value cannot be read as timestamp"),
        ("!!bool x", "line 2, column 5: a value cannot be read as bool"),
        ('!!int ""', "line 2, column 5: a value cannot be read as int"),
        ("!!int x", "line 2, column 5: a value cannot be read as int"),
        ('!!float ""', "line 2, column 5: a value cannot be read as float"),
        ("0100", "line 2, column 5: a value cannot be read as int: 0100 would be a number in base 8; write it without"),
        ("-00", "-00 would be a number in base 8"),
        ("10:30", "10:30 would be a number in base 60; write it as text in quotes, or in base 10"),
        ("1:30.5", "1:30.5 would be a number in base 60"),
        ("!!map [a]", "line 2, column 5: expected a mapping, found a sequence"),
        ("!!map a", "line 2, column 5: expected a mapping, found a scalar"),
        ("!!set [a]", "line 2, column 5"),
        ("!!omap {a: b}", "line 2, column 5"),
        ("!!pairs x", "line 2, column 5"),
        ("!!binary é", "line 2, column 5"),
        ("{[]: 1}", "line 2, column 6"),
        ("{{}: 1}", "line 2, column 6"),
        ("{!!set {a: b}: 1}", ""),
    ],
)
def test_a_value_that_its_tag_does_not_fit_is_named_with_its_place(value, expected):
    with pytest.raises(ConfigError) as raised:
        parse_yaml(f"k:\n a: {value}", "mine.yaml")
    assert expected in str(raised.value)


def test_values_that_fit_their_tags_are_read():
    text = "a: !!timestamp 2026-01-02\nb: !!bool 'yes'\nc: !!int '7'\nd: !!map {a: 1}\ne: !!float '1'"
    read = {"a": datetime.date(2026, 1, 2), "b": True, "c": 7, "d": {"a": 1}, "e": 1.0}
    assert parse_yaml(text, "mine.yaml") == read


def test_numbers_are_those_that_people_mean():
    text = "[0, -5, 1_000, 0x10, 0b11, 0.5, .5, 1e-3, -2E+1, 1.5e3, 1.e2, .inf, '0100', '10:30', 1e, e3]"
    expected = [0, -5, 1000, 16, 3, 0.5, 0.5, 0.001, -20.0, 1500.0, 100.0, float("inf"), "0100", "10:30", "1e", "e3"]
    found = parse_yaml(text, "mine.yaml")
    assert found == expected
    assert [type(each) for each in found] == [type(each) for each in expected]


# Files that extend others


def error_of(path):
    with pytest.raises(ConfigError) as raised:
        load_rules(path)
    return str(raised.value)


@pytest.mark.parametrize(
    "name", ["~nobody/x", "~no-such-user/x", "~no-such-user/x.yaml", "a\0b", "x" * 5000, "..", "/", "", "\ud800"]
)
def test_a_name_that_no_file_has_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match="extends: there is no "):
        parse_rules({"extends": [name]})
    with pytest.raises(ConfigError, match="there is no rules file"):
        load_rules(name)


SECRET = "root:x:0:0:root:/root:/bin/bash\nsecret-of-the-house\n"


@pytest.mark.parametrize("content", [SECRET, f"- {SECRET}", f"token: {SECRET}", f"rules: [{SECRET}", "\tsecret"])
@pytest.mark.parametrize("name", ["../passwd", "passwd", "link.yaml"])
def test_a_file_that_is_no_rules_is_not_shown(tmp_path, name, content):
    (tmp_path / "passwd").write_text(content)
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "passwd").write_text(content)
    (tmp_path / "rules" / "link.yaml").symlink_to(tmp_path / "passwd")
    child = tmp_path / "rules" / "child.yaml"
    child.write_text(f"extends: {name}")
    text = error_of(child)
    assert text.startswith(f"{child}, line 1: extends: '{name}' is not a YAML file; its name must end in .yaml or .yml")
    assert "secret" not in text


@pytest.mark.parametrize("content", ["secret of the house", "{secret", "[secret", "3", "secret: [1", "- secret"])
def test_of_a_yaml_file_that_is_no_rules_no_value_is_shown(tmp_path, content):
    (tmp_path / "other.yaml").write_text(content)
    (tmp_path / "child.yaml").write_text("extends: other.yaml")
    assert "secret" not in error_of(tmp_path / "child.yaml")


def test_more_files_than_anyone_extends_are_refused_at_once(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: [" + "ktransformers," * 4000 + "dense]")
    assert "extends names 4,001 files; the limit is 32" in error_of(tmp_path / "a.yaml")
    for number in range(60):
        (tmp_path / f"b{number}.yaml").write_text(f"extends: b{number + 1}.yaml")
    assert "extends: more than 32 files in total" in error_of(tmp_path / "b0.yaml")


def test_more_rules_than_anyone_writes_are_refused():
    rule = {"match": {"name": "x"}, "replace": {"class": "default"}}
    with pytest.raises(ConfigError, match="1,001 rules; a file may have 1,000"):
        parse_rules([rule] * 1001)


# Patterns


@pytest.mark.parametrize("pattern", [r"^(a|a)*$", r"(a|aa)+$"])
def test_a_search_takes_no_more_than_its_time(pattern):
    (rule,) = parse_rules([{"match": {"name": pattern}, "replace": {"class": "default"}}], "mine.yaml").rules
    rule.match_name.time.left *= 0.1
    with pytest.raises(ConfigError, match=r"mine.yaml: rule 1 \(default\): match: name .* takes too long"):
        rule.matches("a" * 60 + "!", nn.Identity())


def test_all_searches_for_all_patterns_of_a_rule_set_share_their_time():
    slow = [r"^(a|a)*$", r"^(a|a)+$", r"^(\w|a)*$"]
    rules = parse_rules([{"match": {"name": each}, "replace": {"class": "default"}} for each in slow]).rules
    assert len({id(rule.match_name.time) for rule in rules}) == 1
    rules[0].match_name.time.left = 0.1
    with pytest.raises(ConfigError, match="takes too long"):
        any(rule.matches(f"{'a' * 13}!{number}", nn.Identity()) for number in range(1000) for rule in rules)


def test_usual_patterns_take_next_to_no_time_and_match_as_pythons_do():
    import re

    paths = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(60) for name in "qkvo"]
    for pattern in (
        r"\.layers\.(\d|1[0-5])\.self_attn",
        r"^model\.layers\.(?!.*o_proj).*$",
        r"[qk]_proj$",
        "(?i)LAYERS",
    ):
        own = ModulePattern(pattern)
        assert [own.is_in(path) for path in paths] == [re.search(pattern, path) is not None for path in paths]
        assert own.time.left > 0.5


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("x" * (MOST_CHARACTERS + 1), "has 501 characters"),
        ("(" * 60 + "a" + ")+" * 60, "nests groups more than 8 deep"),
        ("a{99999999}", "repeats more than 10,000 times"),
        ("(a{999}){999}", "repeats more than 10,000 times"),
        ("a{99999999999999999999}", "repeats more than 10,000 times"),
        ("(?P<a", "is not a regular expression"),
        (r"\p{L}", "is not a regular expression: bad escape"),
    ],
)
def test_a_pattern_that_could_not_even_be_compiled_is_refused(pattern, expected):
    with pytest.raises(ConfigError, match=r"mine.yaml: rule 1: match: name .*") as raised:
        parse_rules([{"match": {"name": pattern}, "replace": {"class": "default"}}], "mine.yaml")
    assert expected in str(raised.value)


def test_brackets_in_escapes_and_sets_are_no_groups():
    assert ModulePattern(r"\(" * 20 + "[(]" * 20 + r"[]({99999}]").is_in("x") is False


# Values


@pytest.mark.parametrize("value", [10**22, 2**63, LARGEST + 1, 10**5000], ids=range(4))
def test_sizes_beyond_all_machines_are_refused_by_inject(value):
    from tests.support.tiny_models import tiny_model

    with pytest.raises(
        HeteroKVError, match=r"chunk_size is .*; it must be a whole number .*of at most 1,099,511,627,776"
    ):
        inject(tiny_model("llama"), "ktransformers", command_line={"chunk_size": value})


@pytest.mark.parametrize("name", ["chunk_size", "max_seq_len", "block_size", "top_k_blocks", "budget", "alpha"])
def test_no_number_is_too_large_for_an_error(name):
    for value in (10**23, 10**400, [10**23], [1] * 5000, f"pyramid(1,{'9' * 5000})", float("inf"), "9" * 5000):
        with pytest.raises(HeteroKVError):
            parse_rules({"extends": "ktransformers", "long_context": {name: value}})


def test_seeds_have_a_maximum_of_their_own():
    from hetero_kv.chat.options import AnswerSettings

    assert AnswerSettings(seed=2**63 - 1).seed == 2**63 - 1


def test_texts_of_errors_are_cut():
    for content in (
        {"x" * 100_000: 1},
        [["x" * 100_000]],
        {"rules": "x" * 100_000},
        [{"match": {"name": "x"}, "replace": {"class": "x" * 100_000}}],
        [{"match": {"name": "x"}, "replace": {"class": "x." * 50_000 + "y"}}],
        {"extends": "x" * 100_000},
        {"extends": "ktransformers", "long_context": {"x" * 100_000: 1}},
        {"extends": "ktransformers", "long_context": {"kv_type": "x" * 100_000}},
    ):
        with pytest.raises(ConfigError) as raised:
            parse_rules(content)
        assert len(str(raised.value)) <= LONGEST_TEXT
    assert len(str(HeteroKVError("x" * 3000 + "remedy"))) == LONGEST_TEXT
    assert str(HeteroKVError("x" * 3000 + "remedy")).endswith("remedy")


def test_the_settings_file_has_the_same_limits(tmp_path):
    path = tmp_path / "config.yaml"
    for bomb, expected in BOMBS.values():
        path.write_text(bomb)
        with pytest.raises(ConfigError, match=expected):
            read_settings_file(path)
    path.write_text("long_context: {chunk_size: !!int ''}")
    with pytest.raises(ConfigError, match=r"config\.yaml, line 1, column 28: a value cannot be read as int"):
        read_settings_file(path)


def test_a_settings_file_that_no_file_can_be_is_an_error_and_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / ("x" * 5000)))
    assert ensure_settings_file() is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings_file()


def test_values_within_the_limits_are_taken():
    assert settings_from_mapping(EngineSettings, {"chunk_size": LARGEST}, where="here").chunk_size == LARGEST


def test_a_text_is_parsed_once_and_each_caller_gets_its_own_values(monkeypatch):
    text = "a: {b: [1]}  # read by several callers"
    first = parse_yaml(text, "a file")
    first["a"]["b"].append(2)
    monkeypatch.setattr(yaml, "load", None)
    second = parse_yaml(text, "a file")
    assert second == {"a": {"b": [1]}}
    assert second["a"].line == second.key_lines["a"] == 1
