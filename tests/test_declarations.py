"""What rules know of an operator before its class is loaded is what the class says."""

from __future__ import annotations

import pytest

import hetero_kv
from hetero_kv import operators
from hetero_kv.families.bounded.eviction.registry import POLICIES
from hetero_kv.families.token_retrieval.choosers.registry import CHOOSERS
from hetero_kv.operators import DECLARATIONS
from hetero_kv.rules import parse_rules
from hetero_kv.rules.operator_names import declaration_of, named_operator
from hetero_kv.settings.declaration import LoadedOperator


@pytest.mark.parametrize("declared", DECLARATIONS.values(), ids=lambda declared: declared.name)
def test_a_declaration_says_what_its_class_says(declared):
    operator = declared.load()
    assert declared.name == operator.__name__
    assert declared.module == operator.__module__
    of_class = LoadedOperator.of(operator)
    assert declared.meaning == of_class.meaning != ""
    assert declared.settings_class is of_class.settings_class
    assert declared.chosen_by == of_class.chosen_by
    assert declared.registries() == of_class.registries()
    choices = declared.variants.names() if declared.variants else (None,)
    for choice in (*choices, "no such one"):
        kwargs = {declared.chosen_by: choice}
        assert declared.settings_class_for(kwargs) is of_class.settings_class_for(kwargs)


@pytest.mark.parametrize("registry", [POLICIES, CHOOSERS], ids=["policies", "choosers"])
def test_an_implementation_takes_the_settings_that_are_declared_with_it(registry):
    for name in registry.names():
        found = registry.get(name)
        assert getattr(found.settings(), registry.setting) == name
        arguments = (found.settings(), 0, 1) if registry is POLICIES else (found.settings(), 0)
        assert found.implementation(*arguments).settings == found.settings()


def test_the_operators_that_ship_are_the_concrete_classes_of_operators():
    bases = {"Operator", "AttentionOperator"}
    assert [*DECLARATIONS] == sorted(DECLARATIONS)
    assert {*DECLARATIONS} == {*operators.__all__} - bases
    assert {*operators.__all__} <= {*dir(operators)}
    for name in bases:
        assert getattr(operators, name).__name__ == name


@pytest.mark.parametrize("name", DECLARATIONS)
def test_every_spelling_of_an_operator_is_one_declaration(name):
    declared = DECLARATIONS[name]
    for spelling in (name, f"hetero_kv.operators.{name}", f"{declared.module}.{name}"):
        assert named_operator(spelling, "here") is declared
    assert declaration_of(declared.load()) is declared


def test_an_operator_that_does_not_ship_is_declared_by_its_class():
    name = "hetero_kv.evals.recording_attention.RecordingAttention"
    (rule,) = parse_rules([{"match": {"name": "x"}, "replace": {"class": name}}]).rules
    assert isinstance(rule.declaration, LoadedOperator)
    assert rule.operator is rule.declaration.load()
    assert rule.declaration == declaration_of(rule.operator)


def test_the_package_lists_its_names():
    assert {*hetero_kv.__all__} <= {*dir(hetero_kv)}
    for name in hetero_kv.__all__:
        assert getattr(hetero_kv, name) is not None
