"""Policies without a model: settings, budgets, ranking, the registry."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded import eviction
from hetero_kv.families.bounded.eviction import registry
from hetero_kv.families.bounded.eviction.h2o import H2OSettings
from hetero_kv.families.bounded.eviction.pyramidkv import PyramidKV, PyramidKVSettings
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.roco import RoCoSettings
from hetero_kv.families.bounded.eviction.snapkv import SnapKVSettings
from hetero_kv.families.bounded.eviction.streaming_llm import StreamingLLMSettings
from hetero_kv.families.bounded.eviction.tova import Tova, TovaSettings
from hetero_kv.gpu_ops.cached_entries import protected
from hetero_kv.rules.registered import registered
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.settings.setting import ConfigError, SettingError


def rules_of(**kwargs):
    replace = {"class": "hetero_kv.operators.BoundedAttention", "kwargs": kwargs}
    return parse_rules([{"match": {"name": "x"}, "replace": replace}])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_the_best_are_the_highest_and_the_earlier_of_equals(scores, data):
    count = data.draw(st.integers(0, len(scores)))
    expected = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])
    assert best(torch.tensor([scores]), count)[0].tolist() == expected


def test_protected_entries_are_kept_whatever_their_score():
    scores = torch.tensor([0.1, 9.0, 8.0, 7.0, 0.0])
    assert best(protected(scores, first=1, last=1), 3).tolist() == [0, 1, 4]


@pytest.mark.parametrize("name", eviction.names())
def test_every_policy_has_settings_that_name_it_and_a_meaning(name):
    policy = eviction.get(name)
    assert policy.settings().policy == name
    assert policy.meaning
    settings = rules_of(policy=name.upper(), budget=500)
    assert settings.operator_settings(settings.rules[0]) == policy.settings(budget=500)


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"policy": "tovva"}, ["policy is 'tovva'", "did you mean tova?"]),
        ({"policy": "tova", "recent_tokens": 3}, ["unknown setting 'recent_tokens'"]),
        ({"policy": "snapkv", "kernel_size": 4}, ["kernel_size is 4", "odd"]),
        ({"policy": "snapkv", "budget": 64}, ["budget is 64", "at least 65"]),
        ({"policy": "streaming_llm", "budget": 4}, ["budget is 4", "at least 5"]),
        ({"policy": "h2o", "budget": 1.5}, ["budget is 1.5", "at most 1.0"]),
        ({"policy": "h2o", "budget": 0}, ["budget is 0", "at least 1"]),
        ({"policy": "h2o", "recent_ratio": 2}, ["recent_ratio is 2"]),
        ({"policy": "tova", "stride": 0}, ["stride is 0"]),
    ],
)
def test_a_mistake_is_an_error_that_names_setting_value_and_remedy(kwargs, parts):
    def settings():
        rule_set = rules_of(**kwargs)
        return rule_set.operator_settings(rule_set.rules[0])

    with pytest.raises(ConfigError) as raised:
        settings()
    for part in parts:
        assert part in str(raised.value)


def test_an_unknown_policy_is_an_error_that_names_those_known():
    with pytest.raises(HeteroKVError, match=r"'h20' is not an eviction policy; did you mean h2o\?; known: .*tova"):
        eviction.get("h20")


@pytest.mark.parametrize(("budget", "length", "expected"), [(300, 5000, 300), (0.2, 4096, 820), (0.001, 4096, 5)])
def test_a_share_is_one_of_the_prompt_and_never_below_what_the_policy_needs(budget, length, expected):
    policy = eviction.get("streaming_llm").implementation(StreamingLLMSettings(budget=budget), 0, 4)
    assert policy.budget_for(length) == expected


def budgets(layers, length, **settings):
    return [PyramidKV(PyramidKVSettings(**settings), i, layers).budget_for(length) for i in range(layers)]


@example(layers=9, budget=30, length=35, beta=1.5)
@given(st.integers(2, 40), st.integers(20, 3000), st.integers(0, 100_000), st.floats(1, 40))
def test_pyramid_budgets_fall_and_have_the_flat_total(layers, budget, length, beta):
    found = budgets(layers, length, budget=budget, recent_tokens=16, beta=beta)
    assert found == sorted(found, reverse=True)
    assert sum(found) == layers * budget
    assert found[-1] >= 16


def test_the_pyramid_is_as_steep_as_the_paper_says_and_flat_for_short_prompts():
    assert budgets(5, 100_000, budget=1064, recent_tokens=64) == [2014, 1539, 1064, 589, 114]
    assert budgets(5, 1900, budget=1064, recent_tokens=64) == [1064] * 5
    assert budgets(3, 2030, budget=1064, recent_tokens=64) == [2014, 1064, 114]
    assert budgets(3, 2005, budget=1064, recent_tokens=64) == [2005, 1064, 123]
    assert budgets(4, 100_000, budget=1064, recent_tokens=64, beta=1) == [1064] * 4


def test_minimal_budgets_keep_the_protected_entries():
    assert SnapKVSettings(budget=65).min_budget == 65
    assert RoCoSettings(budget=11).min_budget == 11
    with pytest.raises(SettingError, match="needs at least 11 entries"):
        RoCoSettings(budget=10)
    assert H2OSettings(budget=1).min_budget == 1


def test_a_new_policy_is_one_class_and_appears_by_itself(monkeypatch):
    monkeypatch.setattr(registry.POLICIES, "known", dict(registry.POLICIES.known))

    @dataclass(frozen=True)
    class OldestSettings(TovaSettings):
        policy: str = eviction.policy_setting("oldest")

    eviction.register("oldest", meaning="the oldest, for this test", implementation=Tova)(OldestSettings)
    entries = next(entries for kind, entries in registered().items() if "policy" in kind)
    assert ("oldest", "the oldest, for this test") in entries
    rule_set = rules_of(policy="oldest", stride=7)
    assert rule_set.operator_settings(rule_set.rules[0]) == OldestSettings(stride=7)
