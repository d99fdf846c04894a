"""Rules are data: they name operators, and import only what the user trusts."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from hetero_kv.cli import main
from hetero_kv.errors import ConfigError
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules import operator_names
from hetero_kv.rules.injecting import inject
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.rule_file import load_rules, parse_rules
from hetero_kv.rules.settings_file import read_settings_file, read_trusted_modules

OWN = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from hetero_kv.operators import RetrievalAttention
class Mine(RetrievalAttention):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that modules are imported from, with `own_methods.Mine`, which leaves a file `ran` when it is imported,
    and rules that name it."""
    (tmp_path / "own_methods.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(rules("own_methods.Mine"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def rules(name):
    return f"rules: [{{match: {{name: x}}, replace: {{class: {name}}}}}]"


def refusal(function, *arguments, **named):
    with pytest.raises(ConfigError) as raised:
        function(*arguments, **named)
    return str(raised.value)


def test_a_module_that_is_not_trusted_is_refused_and_not_imported(folder):
    for refused in (
        refusal(load_rules, folder / "own.yaml"),
        refusal(named_config, str(folder / "own.yaml")),
        refusal(load_rules, folder / "own.yaml", trust_rules=["own_method", "own_methods.inner", "wn_methods"]),
    ):
        assert "own.yaml: rule 1: replace, line 1: class 'own_methods.Mine' is in a module that is not" in refused
        assert "give --trust_rules own_methods" in refused
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("trusted", [["own_methods"], "own_methods", ("other", "own_methods")])
def test_a_module_that_is_trusted_by_name_is_imported(folder, trusted):
    (rule,) = load_rules(folder / "own.yaml", trust_rules=trusted).rules
    assert issubclass(rule.operator, RetrievalAttention)
    assert (folder / "ran").exists()


def test_submodules_of_a_trusted_package_are_trusted(folder):
    (folder / "own_package").mkdir()
    (folder / "own_package" / "inner.py").write_text(OWN)
    (rule,) = parse_rules(rules("own_package.inner.Mine"), trust_rules=["own_package"]).rules
    assert rule.operator.__name__ == "Mine"


def test_a_parent_is_read_with_the_same_trust(folder):
    (folder / "child.yaml").write_text("extends: own.yaml")
    assert "own.yaml: rule 1" in refusal(load_rules, folder / "child.yaml")
    assert not (folder / "ran").exists()
    assert load_rules(folder / "child.yaml", trust_rules=["own_methods"]).rules


def test_inject_takes_trust_for_a_file(folder):
    from tests.support.tiny_models import tiny_model

    assert "is not trusted" in refusal(inject, tiny_model("llama"), folder / "own.yaml")
    # Trusted, it is read; it then matches nothing.
    with pytest.raises(ValueError, match="matches no module"):
        inject(tiny_model("llama"), folder / "own.yaml", trust_rules=["own_methods"])


def test_a_rules_file_cannot_trust_itself(folder):
    (folder / "own.yaml").write_text("trust_rules: [own_methods]\n" + rules("own_methods.Mine"))
    assert "unknown key 'trust_rules'" in refusal(load_rules, folder / "own.yaml")
    (folder / "own.yaml").write_text("long_context: {trust_rules: [own_methods]}\nextends: ktransformers")
    assert "unknown setting 'trust_rules'" in refusal(load_rules, folder / "own.yaml")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("block", ["", "long_context: {chunk_size: 7}\n", "chunk_size: 7\n"])
def test_the_settings_file_trusts_modules_too(folder, block):
    (folder / "settings.yaml").write_text(f"trust_rules: [own_methods, other]\n{block}")
    assert read_trusted_modules() == ("own_methods", "other")
    assert read_settings_file() == ({"chunk_size": 7} if block else {})


@pytest.mark.parametrize("value", ["{a: b}", "[1]", "[a b]", "['']", "3", "['a..b']", "[[a]]"])
def test_invalid_module_names_are_named(folder, value):
    (folder / "settings.yaml").write_text(f"\ntrust_rules: {value}")
    assert f"{folder / 'settings.yaml'}, line 2: trust_rules" in refusal(read_trusted_modules)


def test_commands_take_the_flag_once_or_more_often_and_the_settings_file(folder, capsys):
    def status(*flags):
        code = main(["rules", str(folder / "own.yaml"), "--model", str(folder / "nowhere"), *flags])
        return code, "is not trusted" in capsys.readouterr().err

    assert status() == (2, True)
    assert not (folder / "ran").exists()
    # Trusted, the next thing that is wrong is the model.
    assert status("--trust_rules", "own_methods") == (2, False)
    assert status("--trust-rules", "first,own_methods", "--trust_rules", "last") == (2, False)
    (folder / "settings.yaml").write_text("trust_rules: own_methods")
    assert status() == (2, False)


@pytest.mark.parametrize("raised", ["SystemExit(3)", "BaseException('no')", "GeneratorExit", "RuntimeError('no')"])
def test_whatever_a_trusted_module_raises_is_an_error_that_names_it(folder, raised):
    (folder / "own_broken.py").write_text(f"raise {raised}")
    text = refusal(parse_rules, rules("own_broken.Mine"), "mine.yaml", ["own_broken"])
    assert text.startswith("mine.yaml: rule 1: replace, line 1: class 'own_broken.Mine' cannot be imported (")


def test_ctrl_c_while_a_module_is_imported_is_ctrl_c(folder):
    (folder / "own_slow.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        parse_rules(rules("own_slow.Mine"), trust_rules=["own_slow"])


@pytest.fixture
def offered(folder):
    """`own_methods.Mine` as an installed package offers it."""
    info = folder / "own_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own_methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{operator_names.ENTRY_POINTS}]\nmine = own_methods:Mine\n")
    operator_names._offered.cache_clear()
    yield
    operator_names._offered.cache_clear()


@pytest.mark.parametrize("name", ["mine", "own_methods.Mine"])
def test_entry_points_of_installed_packages_need_no_trust(folder, offered, name):
    assert [each.name for each in metadata.entry_points(group=operator_names.ENTRY_POINTS)] == ["mine"]
    (rule,) = parse_rules(rules(name)).rules
    assert rule.operator.__name__ == "Mine"


def test_other_modules_of_an_installed_package_need_trust(folder, offered):
    assert "is not trusted" in refusal(parse_rules, rules("own_methods.Other"))
    assert not (folder / "ran").exists()


def test_a_class_to_match_imports_nothing(folder, monkeypatch):
    from torch import nn

    lazy = type(sys)("own_lazy")
    lazy.__getattr__ = lambda name: (folder / "ran").touch()
    monkeypatch.setitem(sys.modules, "own_lazy", lazy)
    for name in ("own_methods.Mine", "own_lazy.Mine"):
        (rule,) = parse_rules(f"rules: [{{match: {{class: {name}}}, replace: {{class: default}}}}]").rules
        assert not rule.matches("x", nn.Identity())
    assert not (folder / "ran").exists()
