"""Contexts at an address: stored once, and found by every machine."""

from __future__ import annotations

import json
import sys
import threading

import pytest
import torch

from hetero_kv.cli import main
from hetero_kv.contexts import shared_pruning
from hetero_kv.contexts.folder import contexts_at
from hetero_kv.contexts.store import ContextStore
from hetero_kv.errors import ConfigError
from tests.contexts.conversations import goes_on, said
from tests.contexts.shared.machines import TOKENS, document, fetched, model_of, objects, upload, wait_until
from tests.support.faulty_files import FaultyFiles
from tests.support.slow_variants import with_few
from tests.support.small_families import FAMILIES, random_tokens

#: Families whose caches go back by removing blocks.
ROLL_BACK = [name for name in FAMILIES if "blocks" in name][1:6]


@pytest.mark.parametrize("family", with_few(["blocks by bounds", "all kinds at once"]))
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_another_machine_continues_exactly(family, kind, machine, tmp_path):
    model = model_of(family)
    address = f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/shared"
    cache, ids = document(model)
    upload(machine("one", address), cache, ids, "notes")
    other = machine("two", address)
    stored = other.named("notes")
    assert other.verify(stored) == []
    loaded = other.load(stored, model, tokenizer=cache.tokenizer)
    assert loaded.computed == 0
    assert loaded.tokens == [ids]
    assert torch.equal(goes_on(model, loaded.cache, [0], 3), goes_on(model, cache, [0], 3))


@pytest.mark.parametrize("family", with_few(["blocks by bounds", *ROLL_BACK], ["blocks by bounds"]))
def test_a_beginning_of_a_context_is_continued_as_in_the_whole_one(family, machine):
    model = model_of(family)
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    two = machine("two")
    stored, common = fetched(two, model, [*ids[:90], 5, 6])
    assert common == 90
    loaded = two.load(stored, model, first=common).cache
    for each in (loaded, cache):
        each.crop(common - TOKENS)
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache, [0], 3))


def test_only_the_blocks_of_the_common_beginning_are_fetched(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    FaultyFiles.operations.clear()
    fetched(machine("two"), model, [*ids[:90], 5, 6])
    read = [path for name, path in FaultyFiles.operations if name == "cat" and "/blocks/" in path]
    assert 0 < len(read) < len(objects("blocks/"))
    FaultyFiles.operations.clear()
    fetched(machine("two"), model, [*ids[:90], 5, 6])
    assert not [name for name, _ in FaultyFiles.operations if name == "cat"]


def test_two_machines_that_save_one_beginning_at_once_store_it_once(model, machine):
    cache, ids = document(model)
    alone = machine("zero", "faulty://alone")
    upload(alone, cache, ids)
    expected = len([path for path in FaultyFiles.store if path.startswith("/alone/")])
    FaultyFiles.delay_s = 0.002
    stores = [machine(name) for name in ("one", "two", "three")]
    for store in stores:
        store.save(cache, ids)
    wait_until(lambda: not any(store._uploads.pending() for store in stores))
    assert len(objects()) == expected
    for store in stores:
        assert [each.tokens for each in store.contexts()] == [TOKENS]


def test_other_blocks_of_the_same_tokens_are_another_context(model, machine, monkeypatch):
    monkeypatch.setattr(shared_pruning, "GRACE_S", -10.0)
    one, two = machine("one"), machine("two")
    _, ids = document(model, 1)
    # Another document's blocks: as if the second machine rounded otherwise.
    contexts = [upload(store, document(model, seed)[0], ids) for store, seed in ((one, 1), (two, 2))]
    one.prune()
    other = machine("three")
    assert {each.file for each in other.contexts()} == {each.file for each in contexts}
    assert [other.verify(each) for each in other.contexts()] == [[], []]


def test_contexts_that_are_saved_at_once_are_all_listed(model, machine):
    stores = [machine(name) for name in ("one", "two", "three")]
    saved = [document(model, seed, 70) for seed in range(6)]

    def save(store, own):
        for cache, ids in own:
            store.save(cache, ids)

    threads = [threading.Thread(target=save, args=(store, saved[2 * n : 2 * n + 2])) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: not any(store._uploads.pending() for store in stores))
    for store in stores:
        assert len(store.contexts()) == 6


def test_a_longer_context_adds_the_rest_alone(model, machine):
    cache, ids = document(model)
    one = machine("one")
    upload(one, cache, ids)
    before = objects("blocks/")
    question = random_tokens(40, 9, 1)
    said(model, cache, (question, question[:, :0]))
    upload(one, cache, [*ids, *question[0].tolist()])
    after = objects("blocks/")
    assert set(before) - set(after) == set()
    assert 0 < len(after) - len(before) < len(before) / 2


def test_a_context_is_found_with_its_salt_alone(model, machine):
    cache, ids = document(model)
    one, two = machine("one"), machine("two")
    upload(one, cache, ids, salt="ann")
    shared = set(objects("blocks/"))
    assert fetched(two, model, [*ids, 5], salt="bob") is None
    assert fetched(two, model, [*ids, 5]) is None
    assert fetched(two, model, [*ids, 5], salt="ann")[1] == TOKENS
    upload(two, cache, ids, salt="bob")
    # Nor are blocks shared between them.
    assert len(set(objects("blocks/")) - shared) == len(shared)


def test_an_address_that_cannot_be_used_is_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"context_folder what://x is no address for fsspec .*Protocol not known"):
        contexts_at("what://x")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"context_folder gs://x/y needs a package that is missing: .*gcsfs"):
        contexts_at("gs://x/y")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"fsspec is missing; pip install 'hetero-kv\[cluster\]', or name a folder"):
        contexts_at("s3://x")
    with contexts_at(tmp_path / "folder") as store:
        assert type(store) is ContextStore


def test_the_command_lists_an_address(model, machine, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    upload(machine("one"), *document(model), "notes")
    address = ["--context_folder", "faulty://contexts"]
    assert main(["contexts", "list", "--json", *address]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["folder"] == "faulty://contexts"
    assert [each["name"] for each in listed["contexts"]] == ["notes"]
    assert listed["bytes"] == sum(len(FaultyFiles.store[path].getvalue()) for path in objects()[:-1])
    assert main(["contexts", "verify", "notes", *address]) == 0
    assert "notes: intact" in capsys.readouterr().out
