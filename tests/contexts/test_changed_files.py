"""A mapped context's file changes: results that depend on it are refused."""

from __future__ import annotations

import os

import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.contexts import tensor_file
from hetero_kv.engine.errors import DamagedContextError
from tests.contexts.conversations import goes_on
from tests.contexts.long_documents import document, reader
from tests.support.small_families import random_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return reader()


@pytest.fixture(scope="module")
def told(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("contexts") / "document"
    cache, ids = document(model)
    cache.save(path, [ids])
    return cache, path.read_bytes()


def changed(path, how):
    """Change a file in place."""
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
        return
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"something else")
    # However coarse the file system's clock is.
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize(("how", "said"), [("cut", r"had [\d,]+ bytes and has"), ("written", "was changed")])
def test_a_file_that_is_changed_is_refused_by_name(model, told, tmp_path, how, said):
    cache, content = told
    path = tmp_path / "c"
    path.write_bytes(content)
    loaded = HeteroCache.load(path, model, verify=False)
    fork = loaded.fork()
    changed(path, how)
    for each in (loaded, fork):
        with pytest.raises(DamagedContextError, match=f"{path} {said}"):
            goes_on(model, each, [0], 3)
        assert each.lengths == cache.lengths
    other = tmp_path / "other"
    other.write_bytes(b"as it was")
    with pytest.raises(DamagedContextError, match=said):
        loaded.save(other)
    assert other.read_bytes() == b"as it was"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "other"]
    loaded.reset()
    again = HeteroCache(model)
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, again, [0], 3))


def test_a_change_in_the_middle_of_a_forward_is_seen_before_its_tokens_are_stored(model, told, tmp_path):
    cache, content = told
    path = tmp_path / "c"
    path.write_bytes(content)
    loaded = HeteroCache.load(path, model)

    def change(*_):
        loaded.on_progress = None
        changed(path, "written")

    loaded.on_progress = change
    with pytest.raises(DamagedContextError, match="was changed"), torch.no_grad():
        model(random_tokens(5, 3, 1), past_key_values=loaded)
    assert loaded.lengths == cache.lengths


def test_a_file_that_is_replaced_or_removed_stays_as_it_was(model, told, tmp_path):
    cache, content = told
    path = tmp_path / "c"
    path.write_bytes(content)
    loaded = HeteroCache.load(path, model, verify=False)
    (tmp_path / "new").write_bytes(content[:1000])
    os.replace(tmp_path / "new", path)
    path.unlink()
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache.fork(), [0], 3))


def test_a_change_while_it_is_saved_is_not_sealed(model, told, tmp_path, monkeypatch):
    path = tmp_path / "c"
    path.write_bytes(told[1])
    loaded = HeteroCache.load(path, model)
    bytes_of = tensor_file.bytes_of

    def read(tensor):
        if path.stat().st_mtime_ns == before:
            changed(path, "written")
        return bytes_of(tensor)

    before = path.stat().st_mtime_ns
    monkeypatch.setattr(tensor_file, "bytes_of", read)
    with pytest.raises(DamagedContextError, match="was changed"):
        loaded.save(tmp_path / "other")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_rows_that_join_another_cache_are_watched_there(model, told, tmp_path):
    _, content = told
    path = tmp_path / "c"
    path.write_bytes(content)
    loaded, joined = HeteroCache.load(path, model), HeteroCache(model)
    joined.extend(loaded)
    changed(path, "written")
    with pytest.raises(DamagedContextError, match="was changed"):
        goes_on(model, joined, [0], 3)
