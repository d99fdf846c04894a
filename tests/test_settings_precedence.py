"""The command line, rules and the settings file: which of several values counts."""

from __future__ import annotations

import pytest

from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.rules.owners import every_settings_class
from hetero_kv.rules.precedence import COMMAND_LINE, DEFAULT, SETTINGS_FILE, SettingsSource, in_force
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.mapping import canonical


def test_of_the_flat_block_each_class_has_its_own() -> None:
    flat = {"chunk_size": 512, "cpu_infer": 10, "second_select_num": 8}
    by_precedence = [SettingsSource("here", canonical(every_settings_class(), flat, where="here"))]
    assert in_force(EngineSettings, by_precedence, where="here").settings == EngineSettings(
        chunk_size=512, threads_num=10
    )
    assert in_force(RetrievalSettings, by_precedence, where="here").settings == RetrievalSettings(top_k_blocks=8)


def test_the_command_line_wins_over_the_rules_file_and_that_over_the_settings_file() -> None:
    by_precedence = [
        SettingsSource(COMMAND_LINE, {"block_size": 1}),
        SettingsSource("a.yaml: rule 1", {"block_size": 2, "token_step": 2}),
        SettingsSource(SETTINGS_FILE, {"block_size": 3, "token_step": 3, "sink_tokens": 3}),
    ]
    found = in_force(RetrievalSettings, by_precedence, where="here")
    assert found.settings == RetrievalSettings(block_size=1, token_step=2, sink_tokens=3)
    sources = {name: source for name, source in found.sources.items() if source != DEFAULT}
    assert sources == {"block_size": COMMAND_LINE, "token_step": "a.yaml: rule 1", "sink_tokens": SETTINGS_FILE}


def test_mistakes_of_the_command_line_are_named_as_such() -> None:
    file = SettingsSource("mine.yaml", {"representative_type": "MEAN", "target_mass": 0.9, "min_blocks": 4})
    flags = SettingsSource(COMMAND_LINE, {"top_k_blocks": 3, "chunk_size": 512})
    with pytest.raises(ConfigError, match=r"^here, with top_k_blocks 3 from the command line: min_blocks"):
        in_force(RetrievalSettings, [flags, file], where="here")
    with pytest.raises(ConfigError, match=r"^here: min_blocks"):
        in_force(RetrievalSettings, [SettingsSource("mine.yaml", flags.settings), file], where="here")
