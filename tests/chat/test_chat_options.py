"""The chat command's flags."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from hetero_kv.chat.options import ChatOptions, add_flags, chat_options
from hetero_kv.errors import ConfigError
from hetero_kv.families.bounded.eviction import BoundedSettings
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.rules.owners import every_settings_class
from hetero_kv.settings.description import describe
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.setting import Settings, setting


def options(*arguments: str) -> ChatOptions:
    return chat_options(parser().parse(arguments))


@cache
def parser() -> FlagParser:
    made = FlagParser("chat", "A chat.")
    add_flags(made)
    return made


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        options(*arguments)
    return str(caught.value)


def test_without_flags_nothing_is_overridden_and_answers_are_greedy():
    flags = options()
    assert flags.mode == "long_context"
    assert flags.rules == "adaptive"
    assert flags.long_context == {}
    assert (flags.answer.temperature, flags.answer.max_new_tokens, flags.answer.fixed_seed) == (0.0, 512, None)


@pytest.mark.parametrize("cls", every_settings_class())
def test_every_long_context_setting_is_a_flag_under_its_name_and_its_aliases(cls):
    # `--seed` is the answer's.
    for row in (row for row in describe(cls) if row.name != "seed"):
        for name in (row.name, *row.aliases):
            assert options(f"--{name}", str(row.default)).long_context == {row.name: row.default}


@pytest.mark.parametrize("flag", ["--max-seq-len", "--max_seq_len", "--max-seq_len"])
def test_dashes_and_underscores_spell_the_same_flag(flag):
    assert options(flag, "64").long_context == {"max_seq_len": 64}
    assert options(f"{flag}=64").long_context == {"max_seq_len": 64}


def test_a_value_keeps_its_dashes():
    assert (
        options("--prompt", "--- a/old-file +++ b/new-file", "--model=my-model").prompt
        == "--- a/old-file +++ b/new-file"
    )
    assert options("--model=my-model").model == "my-model"


def test_ktransformers_names_are_accepted():
    flags = options(
        "--model_path", "folder", "--gguf_path", "w.gguf", "--optimize_config_path", "r.yaml", "--cpu_infer", "3"
    )
    assert (flags.model, flags.gguf_path, flags.rules) == ("folder", "w.gguf", "r.yaml")
    assert flags.long_context == {"threads_num": 3}


def test_values_of_texts_are_stored_as_their_definition_spells_them():
    flags = options("--kv_type", "fp32", "--anchor_type", "BLOCK_MEAN", "--mode", "Normal")
    assert flags.long_context == {"kv_type": "FP32", "representative_type": "MEAN"}
    assert flags.mode == "normal"


def test_an_unknown_flag_is_an_error_with_the_nearest_spelling():
    assert "unknown flag '--promptfile'; did you mean --prompt_file?" in error_of("--promptfile", "x")
    assert "did you mean --chunk_size?" in error_of("--chunck-size=5")


def test_an_abbreviated_flag_is_an_error():
    assert "unknown flag '--max_new'" in error_of("--max_new", "5")


def test_a_stray_word_is_an_error_that_speaks_of_quotes():
    assert "'is' belongs to no flag; put a text of several words into quotes" in error_of(
        "--prompt", "what", "is", "it"
    )


def test_a_missing_value_is_an_error_that_names_the_flag():
    assert "--max_new_tokens: expected one argument" in error_of("--max-new-tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature is -1; it must be a number of at least 0"),
        (("--temperature", "nan"), "temperature is nan; it must be a number of at least 0"),
        (("--temperature", "warm"), "temperature is 'warm'; it must be a number of at least 0"),
        (("--top_p", "0"), "top_p is 0.0; it must be more than 0"),
        (("--top_p", "1.5"), "top_p is 1.5; it must be a number from 0 to 1"),
        (("--top_k", "-1"), "top_k is -1; it must be a whole number of at least 0"),
        (("--min_p", "2"), "min_p is 2; it must be a number from 0 to 1"),
        (("--repetition_penalty", "0"), "repetition_penalty is 0.0; it must be more than 0; 1 for none"),
        (("--thinking", "of"), "thinking is 'of'; it must be default or on or off; did you mean off?"),
        (("--max_new_tokens", "0"), "max_new_tokens is 0; it must be a whole number of at least 1"),
        (("--seed", "-4"), "seed is -4; it must be a whole number from 0"),
        (("--cpu_infer", "0"), "cpu_infer is 0; it must be a whole number of at least 1, or auto"),
        (("--chunk_size", "4096.5"), "chunk_size is 4096.5; it must be a whole number of at least 1"),
        (
            ("--mode", "long_contxt"),
            "mode is 'long_contxt'; it must be long_context or normal; did you mean long_context?",
        ),
        (("--kv_type", "FP17"), "kv_type is 'FP17'; it must be "),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_flag_value_and_range(arguments, message):
    assert f"command line: {message}" in error_of(*arguments)


def test_stop_texts_may_be_several_and_none_is_empty():
    assert options("--stop", "User:", "--stop", "1").stop == ("User:", "1")
    assert "--stop is empty, which would end every answer" in error_of("--stop", "")


def test_a_setting_under_two_names_is_an_error():
    message = error_of("--cpu_infer", "2", "--threads_num", "3")
    assert "'cpu_infer' and 'threads_num' are the same setting" in message


def test_a_setting_that_is_true_or_false_is_a_switch_too():
    @dataclass(frozen=True)
    class Switches(Settings):
        preselect: bool = setting(False, "look twice")

    parser = FlagParser("chat", "A chat.")
    parser.add_settings("switches", "switches", Switches)
    assert parser.parse(["--preselect"]).switches == {"preselect": True}
    assert parser.parse(["--preselect", "false"]).switches == {"preselect": False}


def test_help_shows_meaning_range_unit_and_default_of_every_setting(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        options("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for cls in every_settings_class():
        for row in describe(cls):
            if row.name == "seed":
                continue
            assert ", ".join(f"--{name}" for name in (row.name, *row.aliases)) in text
            assert f"{row.doc} ({row.type}{f', in {row.unit}' if row.unit else ''}; default " in text
    for cls in (EngineSettings, RetrievalSettings, ShadowKVSettings, BoundedSettings):
        for row in describe(cls):
            shown = f"{row.doc} ({row.type}{f', in {row.unit}' if row.unit else ''}; default {row.default}"
            # If operators differ in a setting, the operators' names follow it.
            assert f"{shown})" in text or f"{shown} (" in text
