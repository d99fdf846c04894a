"""Contexts at an address of which something is damaged or gone: never half of one."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.contexts import shared_pruning, shared_store
from hetero_kv.contexts.chunks import chunk_name
from hetero_kv.engine.errors import ContextError, DamagedContextError
from tests.contexts.conversations import goes_on
from tests.contexts.shared.machines import TOKENS, document, fetched, flip, identity_of, objects, upload
from tests.support.faulty_files import FaultyFiles


def test_a_damaged_chunk_is_refused_on_arrival_and_the_context_is_stored_again(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    path = objects("blocks/")[0]
    flip(path, -1)
    two = machine("two")
    with pytest.raises(DamagedContextError, match=rf"{path.removeprefix('/')} was damaged, and is removed"):
        fetched(two, model, [*ids, 5])
    assert path not in objects()
    assert two.longest(identity_of(model), [*ids, 5]) is None
    upload(two, cache, ids)
    assert fetched(machine("three"), model, [*ids, 5])[1] == TOKENS


def test_a_damaged_card_is_not_used_and_is_removed_once_it_is_old(model, machine, caplog, monkeypatch):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    (path,) = objects("contexts/")
    flip(path, 100)
    two = machine("two")
    assert fetched(two, model, [*ids, 5]) is None
    assert "a context at faulty://contexts is not used" in caplog.text
    two.prune()
    assert objects("contexts/") == [path]
    monkeypatch.setattr(shared_pruning, "GRACE_S", -10.0)
    two.prune()
    assert objects("contexts/") == objects("blocks/") == []


def test_half_of_an_object_is_no_context(model, machine, caplog):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    (path,) = objects("contexts/")
    whole = FaultyFiles.store[path].getvalue()
    FaultyFiles.store[path].truncate(len(whole) // 2)
    two = machine("two")
    assert fetched(two, model, [*ids, 5]) is None
    assert "is not used" in caplog.text
    FaultyFiles().pipe_file(path, whole)
    assert fetched(two, model, [*ids, 5])[1] == TOKENS


def test_blocks_that_are_removed_under_a_reader_are_a_clear_miss(model, machine, monkeypatch):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    two = machine("two")
    two.contexts()
    FaultyFiles().rm_file(objects("blocks/")[-1])
    with pytest.raises(ContextError, match="an object of a context is gone"):
        fetched(two, model, [*ids, 5])
    # It is new, and may not be visible as a whole yet.
    assert len(objects("contexts/")) == 1
    monkeypatch.setattr(shared_store, "_SETTLED_S", -10.0)
    with pytest.raises(ContextError, match="an object of a context is gone"):
        fetched(two, model, [*ids, 5])
    assert two.longest(identity_of(model), [*ids, 5]) is None
    assert objects("contexts/") == []
    upload(two, cache, ids)
    assert fetched(machine("three"), model, [*ids, 5])[1] == TOKENS


def test_a_context_that_is_loaded_survives_its_removal_everywhere(model, machine):
    cache, ids = document(model)
    one, two = machine("one"), machine("two")
    upload(one, cache, ids)
    loaded = two.load(fetched(two, model, [*ids, 5])[0], model).cache
    for path in list(two.folder.glob("*.safetensors")):
        path.unlink()
    one.remove(one.contexts()[0])
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache, [0], 3))


def test_a_chunk_that_is_damaged_here_is_fetched_again(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    two = machine("two")
    stored, _ = fetched(two, model, [*ids, 5])
    path = two.folder / sorted(two._index.needs_of(stored.file))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedContextError):
        two.load(stored, model, repair=False)
    fetched(two, model, [*ids, 5])
    assert chunk_name(path.read_bytes()) == path.name
    assert torch.equal(goes_on(model, two.load(stored, model).cache, [0], 3), goes_on(model, cache, [0], 3))
