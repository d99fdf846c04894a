"""What opening a GGUF file finds is kept for the next start, which never takes that of another file or version."""

from __future__ import annotations

import logging
import os
import shutil

import pytest

from hetero_kv.models import ahead, loading, open_model
from hetero_kv.models.gguf import opening
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.packed_cache import PackedCache

ROOMY = 1 << 40
TEXT = "<|im_start|>he hears\nthe sea<|im_end|>"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folder of what is kept; files of any size and age are."""
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(opening, "WORTH_KEEPING", 1)
    monkeypatch.setattr(opening, "SETTLED_NS", 0)
    return tmp_path / "home" / "packed"


@pytest.fixture
def builds(monkeypatch):
    """The files whose tokenizers are built."""
    found, build = [], loading.tokenizer_parts
    monkeypatch.setattr(loading, "tokenizer_parts", lambda file: found.append(file.path) or build(file))
    return found


@pytest.fixture
def path(tiny_gguf, tmp_path):
    return shutil.copy(tiny_gguf, tmp_path / "model.gguf")


def started(path, *, begun=True, limit=ROOMY):
    """A model as a command opens it."""
    if begun:
        ahead.begin(path)
    return open_model(path, device="cpu", packed_cache=PackedCache(limit, ROOMY))


def test_the_next_start_finds_the_same(path, builds):
    first, second = started(path), started(path)
    assert builds == [path]
    assert second.tokenizer(TEXT).input_ids == first.tokenizer(TEXT).input_ids
    assert second.tokenizer.decode(second.tokenizer(TEXT).input_ids) == TEXT
    for name in ("chat_template", "padding_side", "special_tokens_map", "added_tokens_decoder"):
        assert getattr(second.tokenizer, name) == getattr(first.tokenizer, name)
    assert second.model.config.to_dict() == first.model.config.to_dict()
    assert second.model.generation_config.to_dict() == first.model.generation_config.to_dict()
    # The weights are read by the kept header.
    weights = [each.load().model.state_dict() for each in (first, second)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_the_kept_header_is_the_files(path):
    started(path)
    ahead.begin(path)
    assert opening.kept_opening(path).file == GGUFFile.read(path)


def test_what_was_not_begun_is_not_waited_for(path, builds):
    started(path)
    started(path, begun=False)
    assert builds == [path, path]


@pytest.mark.parametrize("change", ["time", "inode", "code"])
def test_another_file_or_version_is_opened_anew(path, builds, change, monkeypatch, home):
    started(path)
    if change == "time":
        os.utime(path, (1, 1))
    elif change == "inode":
        os.replace(shutil.copy2(path, f"{path}.copy"), path)
    else:
        monkeypatch.setattr(opening, "code_digest", lambda *_: "another")
    started(path)
    assert builds == [path, path]
    assert len(list(home.iterdir())) == 2


def test_a_file_that_changes_while_it_is_read_ahead_is_opened_anew(path, builds):
    started(path)
    ahead.begin(path)
    opening._begun[path].result()
    os.utime(path, (1, 1))
    started(path, begun=False)
    assert builds == [path, path]


@pytest.mark.parametrize("place", [0, 40, -1])
def test_damage_is_seen_and_told(path, builds, place, home, caplog):
    started(path)
    (kept,) = home.rglob(opening.OPENING)
    content = bytearray(kept.read_bytes())
    content[place] ^= 1
    kept.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        started(path)
    assert f"{kept} is damaged" in caplog.text
    started(path)
    assert builds == [path, path]


def test_none_is_kept_without_room(path, builds, home):
    started(path, limit=0)
    started(path, limit=0)
    assert builds == [path, path]
    assert not home.exists()


def test_a_tokenizer_that_is_elsewhere_is_not_read_ahead(path):
    ahead.begin("folder", gguf_path=path)
    ahead.begin("organisation/name")
    assert opening._begun == {}
