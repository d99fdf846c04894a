"""`hetero-kv methods` lists everything that rules can name, from the registries."""

from __future__ import annotations

import json

from hetero_kv.cli import main
from hetero_kv.families.bounded import eviction
from hetero_kv.families.retrieval import representatives
from hetero_kv.rules.registered import operator_classes, registered
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage


def test_everything_registered_is_listed_with_its_meaning(capsys):
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    prefills = listed.pop("Attention of prompts (prefill)")
    choosers = listed.pop("Ways to choose tokens of TokenRetrievalAttention (chooser)")
    operators, policies, kinds, types = listed.values()
    assert tuple(kinds) == representatives.names()
    assert tuple(policies) == eviction.names()
    assert tuple(types) == storage.names()
    assert tuple(prefills) == ("dense", "minference", "flexprefill")
    assert set(choosers) == {"infinigen", "sparq", "loki", "magicpig", "retroinfer"}
    assert {"ChunkedDecoderLayer", "RetrievalAttention", "SlidingWindowAttention"} <= set(operators)
    assert all(meaning for kind in (operators, kinds, policies, types, prefills, choosers) for meaning in kind.values())


def test_every_listed_operator_can_be_named_in_a_rule():
    for name in operator_classes():
        rule_set = parse_rules([{"match": {"name": "x"}, "replace": {"class": name}}])
        assert rule_set.rules[0].operator is operator_classes()[name]


def test_abstract_operators_are_not_listed():
    assert not {"Operator", "AttentionOperator"} & set(operator_classes())


def test_a_new_storage_type_appears_by_itself(monkeypatch, capsys):
    monkeypatch.setattr(storage.registry, "_REGISTRY", dict(storage.registry._REGISTRY))
    storage.register(storage.StorageType("FP64", "float64", "float64", 8, "double precision: for this test"))
    assert "FP64" in dict(next(entries for kind, entries in registered().items() if "kv_type" in kind))
    assert main(["methods"]) == 0
    assert "double precision: for this test" in capsys.readouterr().out
