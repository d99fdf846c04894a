"""The settings file: written once, without effect as written, and errors that name the line."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import yaml

from hetero_kv.contexts.settings import ContextCacheSettings, ContextSettings
from hetero_kv.errors import ConfigError
from hetero_kv.families.bounded.eviction import BoundedSettings
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.rules.context_settings import context_settings
from hetero_kv.rules.owners import every_settings_class
from hetero_kv.rules.settings_file import (
    ensure_settings_file,
    read_context_settings,
    read_settings_file,
    settings_path,
    settings_text,
)
from hetero_kv.settings.description import describe
from hetero_kv.settings.engine_settings import EngineSettings

KTRANSFORMERS_BLOCK = """\
chunk_size: 4096 # prefill chunk size
max_seq_len: 100000 # KVCache length
second_select_num: 96
threads_num: 64 # CPU thread num
anchor_type: BLOCK_MEAN
kv_type: FP16
anchor_num: 1
head_select_mode: SHARED
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".hetero_kv" / "config.yaml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_first_run_writes_every_setting_with_its_default_and_meaning(path: Path) -> None:
    assert ensure_settings_file(path) == path
    text = path.read_text(encoding="utf-8")
    for cls in every_settings_class():
        for row in describe(cls):
            assert f"#{row.name}: " in text
            assert row.doc in text
            assert row.type in text
    for cls in (EngineSettings, RetrievalSettings, ShadowKVSettings):
        for row in describe(cls):
            assert f"#{row.name}: {row.default}\n" in text


def test_the_file_as_written_changes_nothing(path: Path) -> None:
    ensure_settings_file(path)
    assert read_settings_file(path) == {}


def test_with_every_setting_uncommented_the_file_holds_the_defaults(path: Path) -> None:
    write(path, re.sub(r"(?m)^  #(?! )", "  ", settings_text()))
    found = read_settings_file(path)
    for cls in (EngineSettings, RetrievalSettings, ShadowKVSettings, BoundedSettings):
        assert {row.name: row.default for row in describe(cls)}.items() <= found.items()
    for name, value in found.items():
        assert value in [row.default for cls in every_settings_class() for row in describe(cls) if row.name == name]
    assert set(found) == {row.name for cls in every_settings_class() for row in describe(cls)}


def test_settings_of_contexts_are_read_from_a_block_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_KV_CONFIG", str(path))
    assert context_settings(ContextCacheSettings, {}) == ContextCacheSettings()
    ensure_settings_file(path)
    assert read_context_settings(path) == {}
    write(path, re.sub(r"(?m)^  #(?! )", "  ", settings_text()))
    assert context_settings(ContextCacheSettings, {}) == ContextCacheSettings()
    write(path, "contexts:\n  context_cache: on\n  context-folder: /elsewhere\nchunk_size: 512\n")
    assert read_settings_file(path) == {"chunk_size": 512}
    settings = context_settings(ContextCacheSettings, {"context_folder": "/here"})
    assert settings == ContextCacheSettings(context_folder="/here", context_cache="on")
    assert context_settings(ContextSettings, {}).context_folder == "/elsewhere"
    write(path, "long_context: {}\ncontexts:\n  context_cach: on\n")
    assert read_settings_file(path) == {}
    with pytest.raises(
        ConfigError, match="contexts, line 3: unknown setting 'context_cach'; did you mean context_cache"
    ):
        context_settings(ContextCacheSettings, {})
    write(path, "contexts:\n  context_cache_gb: -1\n")
    with pytest.raises(ConfigError, match="line 2: context_cache_gb is -1"):
        context_settings(ContextCacheSettings, {})


def test_a_file_that_exists_is_never_touched(path: Path) -> None:
    write(path, "long_context: {chunk_size: 512}")
    ensure_settings_file(path)
    assert path.read_text(encoding="utf-8") == "long_context: {chunk_size: 512}"


def test_writing_leaves_nothing_else_behind(path: Path) -> None:
    ensure_settings_file(path)
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_settings_file(path)
    assert list(path.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "file", "")
    beneath_a_file = tmp_path / "file" / "config.yaml"
    with caplog.at_level(logging.WARNING):
        assert ensure_settings_file(beneath_a_file) is None
    assert str(beneath_a_file) in caplog.text
    assert "HETERO_KV_CONFIG" in caplog.text
    assert read_settings_file(beneath_a_file) == {}


def test_a_user_without_a_home_gets_a_warning_and_the_defaults(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HETERO_KV_CONFIG", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with caplog.at_level(logging.WARNING):
        assert ensure_settings_file() is None
    assert "no home directory" in caplog.text
    assert read_settings_file() == {}


def test_the_file_is_in_the_home_directory_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HETERO_KV_CONFIG", raising=False)
    assert settings_path() == tmp_path / ".hetero_kv" / "config.yaml"
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "other.yaml"))
    assert settings_path() == tmp_path / "other.yaml"
    assert ensure_settings_file() == tmp_path / "other.yaml"


def test_a_missing_or_empty_file_sets_nothing(path: Path) -> None:
    assert read_settings_file(path) == {}
    assert read_settings_file(write(path, "")) == {}


def test_values_come_back_under_the_settings_own_names(path: Path) -> None:
    write(path, "long_context:\n  cpu_infer: 10\n  second_select_num: 8\n  kv_type: fp32\n")
    assert read_settings_file(path) == {"threads_num": 10, "top_k_blocks": 8, "kv_type": "FP32"}


def test_the_flat_block_of_ktransformers_is_read_too(path: Path) -> None:
    assert read_settings_file(write(path, KTRANSFORMERS_BLOCK)) == {
        **yaml.safe_load("{chunk_size: 4096, max_seq_len: 100000, top_k_blocks: 96, threads_num: 64}"),
        **{"representative_type": "MEAN", "kv_type": "FP16", "representative_num": 1, "head_select_mode": "SHARED"},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("long_context:\n  chunk_sizes: 1\n", ": long_context, line 2: unknown setting 'chunk_sizes'; did you mean"),
        ("\nchunk_size: '1'\n", ", line 2: chunk_size is '1'; it must be a whole number"),
        ("chunk_size: 1\nchunk_size: 2\n", ", line 2, column 1: the key 'chunk_size' appears twice, first in line 1"),
        ("long_context: {}\nchunk_size: 1\n", ", line 2: 'chunk_size' is outside long_context; move it inside"),
        ("chunk_size: [1\n", ", line 2, column 1: "),
        ("- chunk_size\n", ": ['chunk_size'] is not a mapping"),
        ("when: !!python/object/apply:os.getcwd []\n", ", line 1, column 7: could not determine a constructor"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_that_names_file_line_and_key(path: Path, text: str, expected: str) -> None:
    write(path, text)
    with pytest.raises(ConfigError) as raised:
        read_settings_file(path)
    assert str(raised.value).startswith(str(path) + expected)


def test_a_file_that_is_there_but_cannot_be_read_is_an_error(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_settings_file(path)


def test_a_file_that_is_not_utf8_is_an_error(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_settings_file(path)
