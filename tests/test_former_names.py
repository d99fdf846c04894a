"""Former names of settings: they work, are told once, and mean what they meant."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetero_kv import inject
from hetero_kv.commands.injected import add_model_flags, injected_model
from hetero_kv.contexts.identity import Identity
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import ConfigError
from hetero_kv.evals import config_specs
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.loading import open_model
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.owners import every_settings_class
from hetero_kv.rules.precedence import SettingsSource, before, in_force
from hetero_kv.rules.rule_file import load_rules, parse_rules
from hetero_kv.rules.setting_flags import add_setting_flags
from hetero_kv.rules.setting_flags import settings_of as flag_settings
from hetero_kv.rules.settings_file import read_settings_file
from hetero_kv.settings import former_names
from hetero_kv.settings.description import describe, oldest_names
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.mapping import canonical, settings_from_mapping
from hetero_kv.settings.setting import Settings, setting
from tests.support.tiny_evaluation import SPARSE, save_tiny, tiny_loaded
from tests.support.tiny_models import tiny_model


@dataclass(frozen=True)
class Retrieves(Settings):
    top_k: int = setting(96, "blocks attended", minimum=0, aliases=("k",), formerly=("block_count", "blocks"))
    sinks: int = setting(128, "first tokens, always attended", formerly=("initial_len",))


@dataclass(frozen=True)
class Evicts(Settings):
    sinks: int = setting(4, "first tokens, always kept", formerly=("first",))


@dataclass(frozen=True)
class OfUser(Settings):
    initial_len: int = setting(64, "first tokens, under the name that the package had once")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(former_names, "_told", set())
    caplog.set_level(logging.WARNING)
    return caplog


def refusal(call: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("former", ["block_count", "blocks", "block-count"])
def test_a_former_name_sets_the_setting(former: str) -> None:
    assert settings_from_mapping(Retrieves, {former: 7}, where="here").top_k == 7


def test_a_former_name_is_told_once_with_todays_name_and_its_place(told: pytest.LogCaptureFixture) -> None:
    for where in ("a.yaml", "b.yaml"):
        canonical((Retrieves,), {"block_count": 7}, where=where)
    assert told.messages == ["a.yaml: the setting block_count is called top_k now; the former name still works"]
    canonical((Retrieves,), {"blocks": 7}, where="c.yaml")
    assert len(told.messages) == 2


def test_todays_names_and_aliases_are_not_told(told: pytest.LogCaptureFixture) -> None:
    canonical((Retrieves,), {"k": 7, "sinks": 1}, where="here")
    assert told.messages == []


@pytest.mark.parametrize("other", ["top_k", "k", "blocks"])
def test_two_names_of_one_setting_are_refused(other: str) -> None:
    text = refusal(lambda: canonical((Retrieves, Evicts), {"block_count": 7, other: 8}, where="here"))
    assert text == f"here: 'block_count' and {other!r} are the same setting, top_k; keep one of them"


def test_a_wrong_value_is_refused_under_todays_name() -> None:
    text = refusal(lambda: canonical((Retrieves,), {"block_count": -1}, where="here"))
    assert text == "here: top_k is -1; it must be a whole number of at least 0"


def test_an_unknown_key_is_answered_with_todays_names_alone() -> None:
    text = refusal(lambda: canonical((Retrieves,), {"initial_line": 1}, where="here"))
    assert text == "here: unknown setting 'initial_line'; known: top_k, k, sinks"


def in_both(mapping: dict[str, int]) -> tuple[int, int]:
    """The sinks of the two classes under settings for both."""
    given = [SettingsSource("here", canonical((Retrieves, Evicts), mapping, where="here"))]
    return in_force(Retrieves, given, where="x").settings.sinks, in_force(Evicts, given, where="x").settings.sinks


def test_a_former_name_counts_for_the_classes_that_had_it() -> None:
    assert in_both({"sinks": 8}) == (8, 8)
    assert in_both({"initial_len": 8}) == (8, 4)
    assert in_both({"first": 8}) == (128, 8)
    assert in_both({"initial_len": 8, "first": 9}) == (8, 9)


def test_a_former_name_beside_todays_is_refused_where_a_class_knows_both() -> None:
    text = refusal(lambda: in_both({"sinks": 8, "initial_len": 9}))
    assert text == "here: 'sinks' and 'initial_len' are the same setting, sinks; keep one of them"


def test_a_setting_of_the_user_keeps_the_name_that_another_had(told: pytest.LogCaptureFixture) -> None:
    given = [SettingsSource("here", canonical((Retrieves, OfUser), {"initial_len": 8}, where="here"))]
    assert in_force(OfUser, given, where="x").settings.initial_len == 8
    assert told.messages == []
    assert in_force(Retrieves, given, where="x").settings.sinks == 8


def test_what_wins_does_so_under_either_name() -> None:
    for first, then in (("sinks", "initial_len"), ("initial_len", "sinks")):
        given = [SettingsSource("one", {first: 1}), SettingsSource("other", {then: 2})]
        assert in_force(Retrieves, given, where="x").settings.sinks == 1
        assert (
            in_force(Retrieves, [SettingsSource("both", before({first: 1}, {then: 2}))], where="x").settings.sinks == 1
        )


def test_former_names_are_flags_that_the_help_leaves_out() -> None:
    parser = FlagParser("program", "a program")
    parser.add_settings("settings", "chosen", Retrieves)
    assert parser.parse(["--block_count", "7"]).chosen == {"block_count": 7}
    assert parser.parse(["--initial-len=3"]).chosen == {"initial_len": 3}
    text = parser.format_help()
    assert "--top_k" in text
    assert not any(former in text for former in ("block_count", "blocks,", "initial_len"))
    assert "did you mean" not in refusal(lambda: parser.parse(["--initial_lan", "1"]))


def test_contexts_record_a_setting_under_its_oldest_name() -> None:
    assert oldest_names(Retrieves) == {"top_k": "block_count", "sinks": "initial_len"}


@pytest.mark.parametrize("cls", every_settings_class(), ids=lambda cls: cls.__name__)
def test_no_two_settings_of_a_class_share_a_name(cls: type) -> None:
    names = [name for row in describe(cls) for name in (row.name, *row.aliases, *row.formerly)]
    assert len(names) == len(set(names))


RETRIEVES: dict[str, Any] = {"match": {"name": r"layers\.0\.self_attn$"}, "replace": {"class": "RetrievalAttention"}}
EVICTS: dict[str, Any] = {"match": {"name": r"layers\.1\.self_attn$"}, "replace": {"class": "BoundedAttention"}}


def settings_of(text: str) -> list[Any]:
    rules = parse_rules(text, "mine.yaml")
    return [rules.operator_settings(rule) for rule in rules.rules]


def test_a_file_of_before_means_what_it_meant(told: pytest.LogCaptureFixture) -> None:
    retrieves, streams, votes = settings_of("""
long_context: {initial_len: 12, second_block_count: 7, sinks: 3, rest: estimate, prefill_price: 0.5}
rules:
  - match: {name: x}
    replace:
      class: RetrievalAttention
      kwargs: {representative_type: MEAN, target_mass: 0.9, least_block_count: 2, whole_block_count: 9}
  - match: {name: y}
    replace: {class: BoundedAttention, kwargs: {policy: streaming_llm}}
  - match: {name: z}
    replace: {class: BoundedAttention, kwargs: {policy: snapkv, window: 8, kernel: 3}}
""")
    assert (retrieves.sink_tokens, retrieves.top_k_blocks, retrieves.residual_attention) == (12, 7, "estimate")
    assert (retrieves.min_blocks, retrieves.max_dense_blocks, retrieves.error_budget) == (2, 9, 0.5)
    assert (retrieves.kernel_size, streams.sink_tokens) == (5, 3)
    assert (votes.recent_tokens, votes.kernel_size, votes.error_budget) == (8, 3, 0.5)
    assert "mine.yaml: long_context, line 2: the setting sinks is called sink_tokens now" in told.text
    assert len(told.messages) == 9


def test_a_recipes_name_and_the_command_line_take_former_names() -> None:
    named = named_config("quest:second_block_count=64")
    assert named.settings == {"top_k_blocks": 64}
    assert named.command_line({"initial_len": 32}) == {"top_k_blocks": 64, "sink_tokens": 32}
    assert named_config("h2o").command_line({"prefill_price": 0.5}) == {"error_budget": 0.5}
    with pytest.raises(ConfigError, match=r"^command line: sink_tokens has no effect here: it is a setting of"):
        named_config("h2o").command_line({"initial_len": 32})


def test_inject_takes_former_names_and_refuses_two_of_one_setting() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    text = refusal(lambda: inject(model, "quest", command_line={"top_k_blocks": 3, "second_block_count": 4}))
    assert text.startswith("command line: 'top_k_blocks' and 'second_block_count' are the same setting, top_k_blocks;")
    injection = inject(model, "quest:second_block_count=5", command_line={"initial_len": 32, "second_block_count": 4})
    settings = injection.operators["model.layers.0.self_attn"].settings
    assert (settings.top_k_blocks, settings.sink_tokens) == (5, 32)


def test_the_settings_file_takes_former_names(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("long_context: {second_block_count: 7, local_windows_len: 99}\n", encoding="utf-8")
    assert read_settings_file(path) == {"top_k_blocks": 7, "local_windows_len": 99}


@pytest.fixture
def identity() -> Callable[..., Identity]:
    def of(**sinks: int) -> Identity:
        model = tiny_model("llama", num_hidden_layers=2)
        retrieves, evicts = deepcopy(RETRIEVES), deepcopy(EVICTS)
        retrieves["replace"]["kwargs"] = {"block_size": 4, "sink_tokens": 8}
        evicts["replace"]["kwargs"] = {"policy": "streaming_llm", "budget": 24, "sink_tokens": 3, **sinks}
        injection = inject(model, parse_rules({"rules": [retrieves, evicts], "long_context": {"max_seq_len": 64}}))
        return Identity.of(model, injection.attention_operators())

    return of


def test_a_context_saved_under_former_names_is_one_of_these_rules(identity: Callable[..., Identity]) -> None:
    here = identity()
    # What version 0.2.0 recorded of the two layers, settings that have their defaults in part.
    recorded = here.recorded["layers"]
    assert recorded["0"].items() >= {"operator": "RetrievalAttention", "block_size": 4, "initial_len": 8}.items()
    assert recorded["1"] == {
        "operator": "BoundedAttention", "policy": "streaming_llm", "budget": 24, "stride": 1024, "sinks": 3,
    }  # fmt: skip
    saved = Identity.read(json.loads(json.dumps(here.recorded)), "saved")
    saved.require(here, "saved")
    assert saved.digest == here.digest


def test_a_context_of_another_setting_is_refused_under_todays_name(identity: Callable[..., Identity]) -> None:
    with pytest.raises(ContextError, match=r"under other settings: in layer 1, sink_tokens 3 \(here 4\); inject rules"):
        identity().require(identity(sink_tokens=4), "saved")


def test_every_command_with_rules_takes_former_names_as_flags(told: pytest.LogCaptureFixture) -> None:
    parser = FlagParser("program", "a program")
    add_setting_flags(parser, lambda _: ())
    flags = parser.parse(["--second_block_count", "7", "--sinks=3", "--initial-len", "8", "--recent", "2"])
    settings = flag_settings(flags)
    assert settings == {"top_k_blocks": 7, "sinks": 3, "initial_len": 8, "recent": 2}
    assert named_config("quest").command_line({"initial_len": settings["initial_len"]}) == {"sink_tokens": 8}
    assert told.messages[0].startswith("command line: the setting second_block_count is called top_k_blocks now")
    assert not re.search(r"--(second_block_count|sinks|initial_len|recent)\b", parser.format_help())


MIXED = """
rules:
  - {match: {name: 'layers\\.0\\.self_attn$'}, replace: {class: RetrievalAttention, kwargs: {block_size: 4}}}
  - match: {name: 'layers\\.[1-9]\\.self_attn$'}
    replace: {class: BoundedAttention, kwargs: {policy: streaming_llm, budget: 96}}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    (tmp_path / "mixed.yaml").write_text(MIXED, encoding="utf-8")
    return str(tmp_path / "mixed.yaml")


def evaluated_sinks(word: str, flags: dict[str, int]) -> list[int]:
    """The sinks of the operators that an evaluation of `word` injects under `flags` for all methods."""
    overrides = canonical(every_settings_class(), flags, where="command line")
    (method,) = (
        ConfiguredModel(tiny_loaded(), config_specs([word]), baseline=False, settings=overrides).described().values()
    )
    names = ("sink_tokens", "initial_len", "sinks")
    found = [each["settings"] or {} for each in method["operators"]]
    return [settings[name] for settings in found for name in names if name in settings]


@pytest.mark.parametrize(
    ("own", "of_all", "sinks"),
    [
        ("initial_len=64", "initial_len", [64, 4]),
        ("sinks=64", "sink_tokens", [32, 64]),
        ("sink_tokens=64", "sinks", [64, 64]),
    ],
)
def test_a_configs_own_setting_wins_under_whichever_name(mixed: str, own: str, of_all: str, sinks: list[int]) -> None:
    assert evaluated_sinks(f"{mixed}:{own}", {of_all: 32}) == sinks


@pytest.mark.parametrize(("word", "sinks"), [("quest:initial_len=64", 64), ("quest", 32)])
def test_a_recipes_own_setting_wins_over_a_former_flag_of_all_methods(word: str, sinks: int) -> None:
    assert evaluated_sinks(word, {"initial_len": 32}) == [sinks]


def test_a_model_opens_under_mixed_rules_with_the_setting_of_each(mixed: str, tmp_path: Path) -> None:
    opened = open_model(save_tiny(tmp_path / "model"), config=f"{mixed}:sinks=8", sink_tokens=16)
    operators = opened.model.hetero_kv_injection.attention_operators()
    assert [each.settings.sink_tokens for each in operators] == [16, 8, 8]


def test_plan_and_rules_inject_mixed_rules_with_the_setting_of_each(mixed: str, tmp_path: Path) -> None:
    parser = FlagParser("program", "a program")
    add_model_flags(parser, "none")
    add_setting_flags(parser, lambda _: ())
    flags = parser.parse(["--model", str(save_tiny(tmp_path / "model")), "--sink_tokens", "16"])
    flags.rules = f"{mixed}:sinks=8"
    operators = injected_model(flags).injection.attention_operators()
    assert [each.settings.sink_tokens for each in operators] == [16, 8, 8]


def test_an_evaluation_records_a_setting_under_its_oldest_name() -> None:
    specs = config_specs(["quest"])
    method = ConfiguredModel(tiny_loaded(), specs, baseline=False, settings=SPARSE).described()["quest"]
    settings = method["operators"][1]["settings"]
    # What version 0.2.0 recorded.
    assert settings.items() >= {"initial_len": 8, "second_block_count": 2, "block_size": 8}.items()
    assert not settings.keys() & {"sink_tokens", "top_k_blocks"}


def test_a_former_name_of_another_operators_setting_is_refused_as_such() -> None:
    text = refusal(lambda: named_config("streaming_llm").command_line({"initial_len": 32}))
    assert text.startswith(
        "command line: initial_len has no effect here: it is the former name of sink_tokens in InfLLMStreamAttention, "
    )
    assert "BoundedAttention (" not in text.partition(", and injection_rules")[0]
    assert "streaming_llm.yaml injects BoundedAttention (streaming_llm), " in text
    assert text.endswith("; write sink_tokens")


def test_a_file_wins_over_the_one_that_it_extends_under_whichever_name(tmp_path: Path) -> None:
    evicts = "rules: [{match: {name: x}, replace: {class: BoundedAttention, kwargs: {policy: streaming_llm}}}]"
    for child, parent in (("sink_tokens", "sinks"), ("sinks", "sink_tokens")):
        (tmp_path / "parent.yaml").write_text(f"{evicts}\nlong_context: {{{parent}: 3}}\n", encoding="utf-8")
        (tmp_path / "child.yaml").write_text(f"extends: parent.yaml\nlong_context: {{{child}: 7}}\n", encoding="utf-8")
        rules = load_rules(tmp_path / "child.yaml")
        settings = rules.operator_settings(rules.rules[0])
        assert settings.sink_tokens == 7
        merged = [SettingsSource("merged", rules.long_context)]
        assert in_force(type(settings), merged, where="x").settings.sink_tokens == 7
