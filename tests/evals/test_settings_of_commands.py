"""Every family's settings come from every source, and unused settings are errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_kv import eject, inject
from hetero_kv.cli import main
from hetero_kv.errors import ConfigError
from hetero_kv.evals.config_spec import config_specs, config_words, require_effect_somewhere, settings_for
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.rules.settings_file import read_settings_file
from tests.support.slow_variants import with_few
from tests.support.tiny_evaluation import save_tiny
from tests.support.tiny_models import tiny_model

INFINIPOT = (
    "top_k_blocks has no effect here: it is a setting of InfLLMStreamAttention, RetrievalAttention and "
    "SelfExtendAttention, and injection_rules/infinipot.yaml injects BoundedAttention (infinipot)"
)


@pytest.fixture(autouse=True)
def _settings_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setattr("hetero_kv.evals.report.draw_plots", lambda folder, summary: ([], None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def command(folder, tmp_path, capsys):
    """Run a command with rules on the tiny model; returns what it printed, or its error where that is due."""

    def run(name, config, *words, status=0):
        rules = [config] if name == "rules" else ["--config", config]
        more = {"chat": ["--prompt", "what", "--max_new_tokens", 2, "--json"], "rules": ["--json"]}.get(name, [])
        if name == "eval":
            more = ["--task", "recite", "--lengths", 150, "--depths", 50, "--no_baseline", "--out", tmp_path / "out"]
        assert main([name, *map(str, (*rules, "--model", folder, *more, *words))]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def in_layers(printed, name):
    """The values of a setting in the layers that have it, in the order of the layers, as `rules --json` prints them."""
    return [row["settings"][name] for row in json.loads(printed)["modules"] if name in row["settings"]]


def test_methods_of_an_evaluation_share_the_weights(command, tmp_path):
    refusal = "weights is q8_0, and all methods of an evaluation run with the same weights"
    assert refusal in command("eval", "dense", "--weights", "q8_0", status=2)
    assert refusal in command("eval", "dense:weights=q8_0", status=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["chat", "plan", "rules", "eval"])
def test_a_flag_without_effect_is_an_error_that_says_for_what_it_counts(command, name):
    assert f"command line: {INFINIPOT}" in command(name, "infinipot", "--top_k_blocks", 100, status=2)


@pytest.mark.parametrize("name", ["chat", "plan", "rules", "eval"])
def test_so_is_a_setting_behind_the_rules_name(command, name):
    word = "infinipot:top_k_blocks=100"
    assert f"config '{word}': {INFINIPOT}" in command(name, word, status=2)


@pytest.mark.parametrize("name", ["chat", "plan", "rules", "eval"])
def test_so_is_a_key_of_the_file_itself(command, name, tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: infinipot.yaml\nlong_context:\n  second_select_num: 100\n")
    message = command(name, tmp_path / "mine.yaml", status=2)
    assert (
        "long_context, line 3: top_k_blocks has no effect here: it is a setting of InfLLMStreamAttention, " in message
    )


def test_a_flag_that_one_of_several_methods_takes_counts_for_that_one():
    specs = config_specs(["tova", "tova:policy=h2o", "streaming"])
    flags = {"budget": 60, "stride": 7, "block_size": 8, "chunk_size": 64}
    require_effect_somewhere(flags, specs)
    assert [set(settings_for(spec, flags)) for spec in specs] == [
        {"budget", "stride", "chunk_size"},
        {"policy", "budget", "chunk_size"},
        {"block_size", "chunk_size"},
    ]
    with pytest.raises(
        ConfigError, match=r"command line: rank has no effect here: it is a setting of ShadowKVAttention"
    ):
        require_effect_somewhere({"rank": 3}, specs)
    with pytest.raises(
        ConfigError, match=r"budget has no effect here: .*, and the untouched model injects no operator"
    ):
        require_effect_somewhere({"budget": 3}, [])


def test_a_list_of_methods_may_hold_lists_of_numbers():
    words = "quest:top_k_blocks=1,2,3,streaming,quest:top_k_blocks=[4, 5],dense:chunk_size=9"
    assert config_words(words) == (
        *("quest:top_k_blocks=1,2,3", "streaming", "quest:top_k_blocks=[4, 5]", "dense:chunk_size=9"),
    )
    assert config_specs(config_words(words))[0].settings == {"top_k_blocks": (1, 2, 3)}
    assert config_words(None) == ()


@pytest.mark.parametrize("name", ["chat", "plan", "rules", "eval"])
@pytest.mark.parametrize(("config", "flag"), with_few([("tova", ("--budget", 50)), ("tova:budget=50", ())]))
def test_every_command_takes_the_settings_of_every_family(command, tmp_path, name, config, flag):
    printed = command(name, config, *flag)
    if name == "rules":
        assert in_layers(printed, "budget") == [50]
    if name == "plan":
        assert "with a budget of 50 entries (tova)" in printed
    if name == "chat":
        operators = json.loads(printed)["settings"]["operators"]
        assert [each["settings"]["budget"] for each in operators if each["operator"] == "BoundedAttention"] == [50]
    if name == "eval":
        (method,) = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]["methods"].values()
        assert method["operators"][1]["settings"]["budget"] == 50


@pytest.mark.parametrize(
    ("config", "flag", "value"),
    [
        ("shadowkv", "--rank", 8),
        ("snapkv_evict", "--recent_tokens", 7),
        ("tova", "--policy", "h2o"),
        ("d2o", "--sink_tokens", 2),
    ],
)
def test_flags_of_every_family_and_policy_reach_their_operators(command, config, flag, value):
    assert in_layers(command("rules", config, flag, value), flag[2:]) == [value]


@pytest.mark.parametrize("words", ["1,2,3", "[1, 2, 3]"])
def test_a_list_works_on_the_command_line(command, words):
    layers = len(in_layers(command("rules", "ktransformers", "--top_k_blocks", "pyramid(1, 90)"), "block_size"))
    numbers = words.replace("3", ", ".join(str(number) for number in range(3, layers + 1)))
    expected = list(range(1, layers + 1))
    assert in_layers(command("rules", "ktransformers", "--top_k_blocks", numbers), "top_k_blocks") == expected
    assert in_layers(command("rules", f"quest:dense_layer_num=0:top_k_blocks={numbers}"), "top_k_blocks") == (expected)


def test_a_flag_of_a_command_keeps_its_meaning_and_the_setting_stands_behind_the_name(command):
    operators = json.loads(command("chat", "random:seed=5", "--seed", 3))["settings"]["operators"]
    assert [each["settings"]["seed"] for each in operators if each["operator"] == "BoundedAttention"] == [5]


def test_a_text_may_hold_numbers_colons_and_commas():
    config = named_config("infinipot:question=1, 2: which one?:budget=64")
    assert config.settings == {"question": "1, 2: which one?", "budget": 64}
    assert named_config("infinipot:catalyst=42").settings == {"catalyst": "42"}


@pytest.mark.parametrize(
    ("operator", "settings"),
    [
        ("ShadowKVAttention", {"rank": 9, "local_chunks": 3}),
        ("BoundedAttention", {"policy": "snapkv", "budget": 90, "recent_tokens": 8}),
        ("RetrievalAttention", {"block_size": 9}),
    ],
)
def test_long_context_may_hold_the_settings_of_any_family(operator, settings):
    rules = parse_rules(
        {
            "long_context": {"chunk_size": 64, **settings},
            "rules": [{"match": {"name": "self_attn$"}, "replace": {"class": operator}}],
        }
    )
    found = rules.operator_in_force(rules.rules[0])
    assert {name: getattr(found.settings, name) for name in settings} == settings
    assert {found.sources[name] for name in settings} == {"rules: long_context"}
    assert rules.engine_settings().chunk_size == 64


def test_a_key_of_an_extended_file_is_not_the_childs_mistake():
    model = tiny_model("llama")
    inject(model, parse_rules("extends: infinipot.yaml\nlong_context: {chunk_size: 64}"))
    eject(model)


def test_the_settings_file_may_hold_what_the_rules_do_not_use(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("long_context: {rank: 8, beta: 20, top_k_blocks: 4, policy: TOVA}")
    read = read_settings_file(tmp_path / "config.yaml")
    assert read == {"rank": 8, "beta": 20.0, "top_k_blocks": 4, "policy": "tova"}
    model = tiny_model("llama")
    injection = inject(model, "d2o", settings_file=read)
    # A beta of 20 is pyramidkv's.
    assert {operator.settings.beta for operator in injection.attention_operators()} == {0.7}
    eject(model)


def test_python_users_are_told_of_settings_without_effect_too():
    model = tiny_model("llama")
    with pytest.raises(
        ConfigError, match="command line: rank has no effect here: it is a setting of ShadowKVAttention"
    ):
        inject(model, "quest", command_line={"rank": 3})
    with pytest.raises(ConfigError, match="command line: unknown setting 'rnak'; did you mean rank"):
        inject(model, "quest", command_line={"rnak": 3})
    assert getattr(model, "hetero_kv_injection", None) is None


def test_mixed_rules_take_a_flag_in_every_operator_that_has_it(command, tmp_path):
    (tmp_path / "mixed.yaml").write_text(
        "extends: h2o.yaml\n"
        r"rules: [{match: {name: 'layers\.0\.self_attn$'}, replace: {class: RetrievalAttention}}]"
    )
    printed = command("rules", tmp_path / "mixed.yaml", "--block_size", 32, "--budget", 40)
    assert (in_layers(printed, "block_size"), in_layers(printed, "budget")) == ([32], [40])


OWN_OPERATOR = """
from dataclasses import dataclass
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.operators import RetrievalAttention
from hetero_kv.settings.setting import setting

@dataclass(frozen=True)
class MineSettings(RetrievalSettings):
    patience: int = setting(3, "of the user's own", minimum=1)

class Mine(RetrievalAttention):
    settings_class = MineSettings
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Rules that name an operator of the user's own module."""
    (tmp_path / "own_patient_operator.py").write_text(OWN_OPERATOR)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.yaml").write_text(
        "extends: ktransformers.yaml\n"
        "rules: [{match: {name: 'self_attn$'}, replace: {class: own_patient_operator.Mine, kwargs: {layer_step: 2}}}]"
    )
    return tmp_path / "own.yaml"


def test_the_settings_of_the_users_own_operators_are_reached_alike(command, own, tmp_path):
    trust = ("--trust_rules", "own_patient_operator")
    assert in_layers(command("rules", own, *trust), "patience") == [3]
    assert in_layers(command("rules", own, "--patience", 5, *trust), "patience") == [5]
    assert in_layers(command("rules", f"{own}:patience=6", *trust), "patience") == [6]
    (tmp_path / "child.yaml").write_text("extends: own.yaml\nlong_context: {patience: 7}")
    printed = command("rules", tmp_path / "child.yaml", *trust)
    assert (in_layers(printed, "patience"), in_layers(printed, "layer_step")) == ([7], [2])
    assert "patience is 0; it must be a whole number of at least 1" in command(
        "plan", own, "--patience", 0, *trust, status=2
    )
    assert "unknown flag '--patiense'; did you mean --patience?" in command(
        "chat", own, "--patiense", 2, *trust, status=2
    )
