"""Packed weights that are read ahead are those of the last start, and no others are ever taken."""

from __future__ import annotations

import logging
import os
import shutil

import pytest

from hetero_kv.models import ahead, packed_cache
from hetero_kv.models.gguf import opening
from hetero_kv.models.packed_ahead import PACKED_AHEAD, PackedReader
from hetero_kv.models.packed_file import WEIGHTS_FILE
from tests.models.test_packed_cache import loaded, packed_bytes, written

MUCH = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folder of what is kept; files of any size and age are."""
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    for module in (packed_cache, opening):
        monkeypatch.setattr(module, "WORTH_KEEPING", 1)
        monkeypatch.setattr(module, "SETTLED_NS", 0)
    yield tmp_path / "home" / "packed"
    assert PACKED_AHEAD.take(None) is None
    opening._begun.clear()


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "tiny.gguf")


@pytest.fixture
def expected(path):
    return packed_bytes(loaded(path, cached=False))


@pytest.fixture
def taken(monkeypatch):
    """The tensors that are taken from what was read ahead."""
    found, copied = [], PackedReader.copied

    def noted(self, name):
        found.append(name)
        return copied(self, name)

    monkeypatch.setattr(PackedReader, "copied", noted)
    return found


def begun(path, most_bytes=MUCH):
    """What the model's file has begun to read, once its thread has read it."""
    ahead.begin(path, most_bytes=most_bytes)
    opening._begun[path].result()
    for thread in [each for each in opening.threading.enumerate() if each.name == "hetero_kv opening"]:
        thread.join()
    if PACKED_AHEAD._reader is not None:
        PACKED_AHEAD._reader._thread.join()


def test_the_next_start_takes_them(path, expected, taken):
    begun(path)
    assert packed_bytes(loaded(path)) == expected
    assert taken == []
    begun(path)
    assert len(taken) == len(expected)
    taken.clear()
    assert packed_bytes(loaded(path)) == expected
    assert len(taken) == len(expected)


def test_those_of_another_packing_are_dropped(path, taken, expected, monkeypatch, home):
    loaded(path)
    begun(path)
    taken.clear()
    monkeypatch.setattr(packed_cache, "_code_version", lambda: "another")
    assert packed_bytes(loaded(path)) == expected
    assert taken == []
    assert len(list(home.rglob(WEIGHTS_FILE))) == 2
    begun(path)
    assert packed_bytes(loaded(path)) == expected
    assert taken


def test_a_start_that_takes_none_leaves_none_to_the_next(path, taken, home):
    loaded(path)
    begun(path)
    loaded(path, weights="bf16")
    assert not list(home.rglob(opening.PACKED))
    taken.clear()
    begun(path)
    assert taken == []


def test_a_file_that_was_replaced_meanwhile_is_read_anew(path, taken, expected, home):
    loaded(path)
    begun(path)
    (kept,) = home.rglob(WEIGHTS_FILE)
    os.replace(shutil.copy(kept, f"{kept}.copy"), kept)
    taken.clear()
    assert packed_bytes(loaded(path)) == expected
    assert taken == []


def test_damage_is_seen(path, taken, expected, home, caplog):
    loaded(path)
    (kept,) = home.rglob(WEIGHTS_FILE)
    content = bytearray(kept.read_bytes())
    content[1000] ^= 1
    kept.write_bytes(content)
    begun(path)
    with caplog.at_level(logging.WARNING):
        assert packed_bytes(loaded(path)) == expected
    assert "packed again" in caplog.text
    assert taken


@pytest.mark.parametrize("room", [0, MUCH])
def test_too_many_are_not_read_ahead(path, taken, expected, room):
    loaded(path, room=room)
    begun(path, most_bytes=MUCH if room == 0 else 1)
    taken.clear()
    assert packed_bytes(loaded(path, room=room)) == expected
    assert taken == []
