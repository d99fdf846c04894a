"""Contexts at an address: stored once, found by every machine, and never half of one."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time

import pytest
import torch

from hetero_kv.cli import main
from hetero_kv.contexts import cards, chunks, medium, shared_pruning, shared_store, uploads
from hetero_kv.contexts.chunks import chunk_name
from hetero_kv.contexts.folder import contexts_at
from hetero_kv.contexts.medium import UnreachableError
from hetero_kv.contexts.shared_store import SharedContextStore
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.errors import ConfigError
from tests.contexts.conversations import goes_on, said
from tests.support.faulty_files import FaultyFiles
from tests.support.slow_variants import with_few
from tests.support.small_families import FAMILIES, random_tokens
from tests.support.small_recipes import injected, new_cache
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread", "always_listed")

TOKENS = 200
ROLL_BACK = [name for name in FAMILIES if "blocks" in name][1:6]


@pytest.fixture
def always_listed(monkeypatch):
    """Listings are never taken for new, chunks are small, and an address that failed is tried again at once."""
    monkeypatch.setattr(cards, "_FRESH_S", 0.0)
    monkeypatch.setattr(cards, "_FRESH_TIMES", 0)
    monkeypatch.setattr(chunks, "_MOST_BYTES", 1 << 14)
    monkeypatch.setattr(medium, "_PAUSES_S", (0.01, 0.01))
    FaultyFiles.reset()
    yield
    FaultyFiles.running.set()


@functools.cache
def model_of(family):
    architecture, rules = FAMILIES[family]
    model = tiny_model(architecture)
    injected(model, rules)
    return model


@pytest.fixture
def model():
    return model_of("blocks by bounds")


@pytest.fixture
def machine(tmp_path):
    """Stores of several machines at one address, each with a disk cache of its own."""
    made = []

    def open_store(name, address="faulty://contexts", *, limit=None, local=None, wait_s=5.0):
        made.append(SharedContextStore(address, limit, tmp_path / name, local, wait_s))
        return made[-1]

    yield open_store
    FaultyFiles.running.set()
    FaultyFiles.error = FaultyFiles.write_error = None
    for store in made:
        store.close()


def document(model, seed=1, tokens=TOKENS):
    """A fork of a cache with a document, and its tokens."""
    computed, ids = computed_document(model, seed, tokens)
    return computed.fork(), list(ids)


@functools.cache
def computed_document(model, seed, tokens):
    computed, ids = new_cache(model), random_tokens(tokens, seed, 1)
    said(model, computed, (ids, ids[:, :0]))
    return computed, ids[0].tolist()


def upload(store, *saved, **named):
    stored = store.save(*saved, **named)
    wait_until(lambda: not store._uploads.pending())
    return stored


def wait_until(is_true):
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < 20
        time.sleep(0.002)


def identity_of(model):
    return model.hetero_kv_injection.identity


def fetched(store, model, tokens, **named):
    """What is fetched and found of a prompt."""
    store.fetch(identity_of(model), tokens, **named)
    return store.longest(identity_of(model), tokens, **named)


def objects(folder=""):
    return sorted(path for path in FaultyFiles.store if path.startswith(f"/contexts/{folder}"))


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


def flip(path, place):
    content = bytearray(FaultyFiles.store[path].getvalue())
    content[place] ^= 1
    FaultyFiles().pipe_file(path, bytes(content))


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


def test_an_upload_that_is_cut_off_shows_nothing_and_goes_on_in_another_process(model, machine):
    cache, ids = document(model)
    one = machine("one")
    FaultyFiles.error = OSError("the network is gone")
    one.save(cache, ids)
    wait_until(lambda: one.failures > 1)
    one.close()
    FaultyFiles.error = None
    assert machine("two").contexts() == []
    again = machine("one")
    wait_until(lambda: not again._uploads.pending())
    assert fetched(machine("two"), model, [*ids, 5])[1] == TOKENS


def test_what_is_forgotten_or_gone_here_is_not_uploaded(model, machine):
    one = machine("one")
    FaultyFiles.error = OSError("the network is gone")
    one.save(*document(model, 1, 70), most=1)
    kept = one.save(*document(model, 2, 80), most=1)
    assert [each.file for each in one._uploads.pending()] == [kept.file]
    (one.folder / kept.file).unlink()
    FaultyFiles.error = None
    wait_until(lambda: not one._uploads.pending())
    assert objects("contexts/") == objects("blocks/") == []


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


def test_an_address_that_is_gone_is_used_again_when_it_is_back(model, machine, caplog):
    cache, ids = document(model)
    one = machine("one")
    FaultyFiles.error = OSError("Connection refused")
    with pytest.raises(UnreachableError, match=r"faulty://contexts is not reachable \(OSError: Connection refused\)"):
        one.fetch(identity_of(model), [*ids, 5])
    with pytest.raises(UnreachableError):
        one.contexts()
    one.save(cache, ids)
    # What is here is found, whatever is there.
    assert one.longest(identity_of(model), [*ids, 5])[1] == TOKENS
    FaultyFiles.error = None
    wait_until(lambda: not one._uploads.pending())
    assert fetched(machine("two"), model, [*ids, 5])[1] == TOKENS
    assert one.failures >= 2
    assert caplog.text.count("requests go on without it") == 1
    assert "faulty://contexts is reachable again" in caplog.text


def test_an_address_that_hangs_is_given_up_in_time(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    two = machine("two", wait_s=0.1)
    FaultyFiles.running.clear()
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"no answer within 0\.1 s"):
        two.fetch(identity_of(model), [*ids, 5])
    assert time.monotonic() - began < 5
    FaultyFiles.running.set()
    wait_until(lambda: not two._medium.away_s)
    assert fetched(two, model, [*ids, 5])[1] == TOKENS


def test_a_slow_address_is_given_up_between_two_objects(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    FaultyFiles.delay_s = 0.6
    two = machine("two", wait_s=1.0)
    with pytest.raises(UnreachableError, match="is too slow"):
        two.fetch(identity_of(model), [*ids, 5])


def test_a_folder_that_is_not_mounted_is_not_written_to(model, machine, tmp_path):
    cache, ids = document(model)
    shared = tmp_path / "shared"
    one = machine("one", f"file://{shared}")
    os.rename(shared, tmp_path / "elsewhere")
    shared.mkdir()
    one.save(cache, ids)
    with pytest.raises(UnreachableError, match=r"there is no hetero-kv-contexts.txt any more; mount the folder"):
        one.contexts()
    wait_until(lambda: one.failures > 2)
    assert list(shared.iterdir()) == []
    shared.rmdir()
    os.rename(tmp_path / "elsewhere", shared)
    wait_until(lambda: not one._uploads.pending())
    assert fetched(machine("two", f"file://{shared}"), model, [*ids, 5])[1] == TOKENS


def test_the_disk_cache_keeps_the_most_recently_used_files_and_what_is_not_uploaded(model, machine):
    one = machine("one")
    for seed in range(4):
        upload(one, *document(model, seed))
    size = sum(path.stat().st_size for path in one.folder.glob("*.safetensors")) // 4
    two = machine("two", local=round(2.5 * size))
    for seed in (0, 1, 0, 2):
        assert fetched(two, model, [*document(model, seed)[1], 5])[1] == TOKENS
    assert sum(path.stat().st_size for path in two.folder.glob("*.safetensors")) <= 2.5 * size
    FaultyFiles.operations.clear()
    fetched(two, model, [*document(model, 0)[1], 5])
    assert not [name for name, _ in FaultyFiles.operations if name == "cat"]
    small = machine("small", local=1)
    with pytest.raises(ContextError, match=r"200 tokens does not fit into the disk cache .*; raise context_local_gb"):
        fetched(small, model, [*document(model, 0)[1], 5])
    FaultyFiles.error = OSError("away")
    stored = small.save(*document(model, 7))
    assert (small.folder / stored.file).exists()


def test_a_full_address_is_read_and_what_waits_for_it_is_bounded(model, machine, caplog):
    upload(machine("one"), *document(model, 0))
    FaultyFiles.write_error = OSError("no space is left")
    two = machine("two", local=1)
    named = two.save(*document(model, 1), "notes")
    for seed in (2, 3, 4):
        newest = two.save(*document(model, seed))
    assert [each.file for each in two._uploads.pending()] == [named.file, newest.file]
    assert {path.name for path in two.folder.glob("*.safetensors")} == two._uploads.files()
    assert "were not uploaded to faulty://contexts in time are removed: 1 do not fit" in caplog.text
    wait_until(lambda: two.failures > 1)
    assert "faulty://contexts cannot be written (OSError: no space is left)" in caplog.text
    assert fetched(machine("three"), model, [*document(model, 0)[1], 5])[1] == TOKENS
    assert len(two.contexts()) == 3
    FaultyFiles.write_error = None
    wait_until(lambda: not two._uploads.pending())
    assert len(machine("four").contexts()) == 3


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


def test_a_name_is_the_newest_context_that_has_it_on_every_machine(model, machine):
    one, two = machine("one"), machine("two")
    upload(one, *document(model, 1), "notes")
    assert two.named("notes").tokens == TOKENS
    upload(one, *document(model, 2, 120), "notes")
    assert [each.tokens for each in two.contexts()] == [120]
    assert len(objects("contexts/")) == 1
    with pytest.raises(ContextError, match="there is no context 'other' in faulty://contexts; there are: notes"):
        two.named("other")


def test_a_name_is_the_context_that_replaces_another_also_before_it_is_uploaded(model, machine, monkeypatch):
    one, two = machine("one"), machine("two")
    upload(one, *document(model, 1), "notes")
    monkeypatch.setattr(uploads.Uploads, "_write", held := HeldWrites(uploads.Uploads._write))
    newer = one.save(*document(model, 2, 120), "notes")
    for _ in range(2):
        assert one.named("notes") == newer
        # News, with which what no context needs is removed here.
        held.passes(two)
        upload(two, *document(model, 3 + len(two.contexts()), 70))
    held.passes(one)
    wait_until(lambda: not one._uploads.pending())
    assert machine("three").named("notes").file == newer.file


def test_a_name_that_two_machines_give_at_once_is_the_newest_context_on_all_of_them(model, machine, monkeypatch):
    one, two = machine("one"), machine("two")
    monkeypatch.setattr(uploads.Uploads, "_write", held := HeldWrites(uploads.Uploads._write))
    for store, seed in ((one, 1), (two, 2)):
        newest = store.save(*document(model, seed, 70), "notes")
    for store in (one, two):
        held.passes(store)
        wait_until(lambda store=store: not store._uploads.pending())
    for _ in range(2):
        for store in (one, two, machine("three")):
            assert store.named("notes").file == newest.file
            assert len(store.contexts()) == 2


class HeldWrites:
    """Uploads of contexts that wait until a test lets those of a store pass."""

    def __init__(self, write):
        self._write, self._passing = write, set()

    def passes(self, store):
        self._passing.add(store._uploads)

    def __get__(self, own, _):
        def write(upload):
            wait_until(lambda: own in self._passing)
            self._write(own, upload)

        return write


def test_a_tenant_keeps_its_newest_contexts(model, machine):
    one = machine("one")
    for seed in range(3):
        upload(one, *document(model, seed), salt="ann", most=2)
    assert len(machine("two").contexts()) == len(objects("contexts/")) == 2


def test_a_removed_context_frees_what_no_other_needs_once_it_is_old(model, machine, monkeypatch):
    cache, ids = document(model)
    one = machine("one")
    first = upload(one, cache, ids)
    question = random_tokens(40, 9, 1)
    said(model, cache, (question, question[:, :0]))
    upload(one, cache, [*ids, *question[0].tolist()])
    blocks = objects("blocks/")
    FaultyFiles().pipe_file("/contexts/partial/half", b"of an object")
    two = machine("two")
    two.remove(first)
    # They may be of a context that is being uploaded.
    assert objects("blocks/") == blocks
    monkeypatch.setattr(shared_pruning, "GRACE_S", -10.0)
    removed, freed = two.prune()
    assert removed == []
    assert freed > 0
    assert len(objects("blocks/")) < len(blocks)
    assert objects("partial/") == []
    (left,) = two.contexts()
    assert two.verify(left) == []


def test_the_least_recently_used_contexts_go_beyond_the_limit(model, machine, monkeypatch):
    monkeypatch.setattr(shared_pruning, "GRACE_S", -10.0)
    one = machine("one")
    for seed in range(3):
        upload(one, *document(model, seed))
    stored, _ = fetched(one, model, [*document(model, 0)[1], 5])
    one.use(stored)
    removed, _ = one.prune(round(one.total_bytes() * 0.7))
    (gone,) = removed
    assert fetched(machine("two"), model, [*document(model, 1)[1], 5]) is None
    assert fetched(machine("two"), model, [*document(model, 0)[1], 5])[1] == TOKENS
    assert gone.tokens == TOKENS


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
    monkeypatch.setenv("hetero-kv_KV_HOME", str(tmp_path / "home"))
    upload(machine("one"), *document(model), "notes")
    address = ["--context_folder", "faulty://contexts"]
    assert main(["contexts", "list", "--json", *address]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["folder"] == "faulty://contexts"
    assert [each["name"] for each in listed["contexts"]] == ["notes"]
    assert listed["bytes"] == sum(len(FaultyFiles.store[path].getvalue()) for path in objects()[:-1])
    assert main(["contexts", "verify", "notes", *address]) == 0
    assert "notes: intact" in capsys.readouterr().out
