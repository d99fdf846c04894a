"""A folder of contexts: blocks are shared, the longest prefix is found, and no intact context is lost."""

from __future__ import annotations

import os
import re
import sqlite3

import pytest
import torch

from hetero_kv import inject
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.errors import ContextError
from tests.contexts.conversations import goes_on, said
from tests.support.slow_variants import with_few
from tests.support.small_families import FAMILIES, random_tokens
from tests.support.small_recipes import injected, new_cache
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

#: Tokens that all contexts here begin with.
COMMON = 100


@pytest.fixture(scope="module", params=with_few(["blocks by bounds", "all kinds at once"]))
def any_model(request):
    architecture, rules = FAMILIES[request.param]
    model = tiny_model(architecture)
    injected(model, rules)
    return model


@pytest.fixture(scope="module")
def model():
    architecture, rules = FAMILIES["blocks by bounds"]
    model = tiny_model(architecture)
    injected(model, rules)
    return model


@pytest.fixture
def store(tmp_path):
    with ContextStore(tmp_path / "contexts") as store:
        yield store


def document(model, seed=1, tokens=COMMON):
    cache, ids = new_cache(model), random_tokens(tokens, seed, 1)
    said(model, cache, (ids, ids[:, :0]))
    return cache, ids[0].tolist()


def with_question(model, cache, ids, seed, tokens=9):
    """A fork that has heard a question more, and its tokens."""
    fork, question = cache.fork(), random_tokens(tokens, seed, 1)
    said(model, fork, (question, question[:, :0]))
    return fork, [*ids, *question[0].tolist()]


def sizes(store):
    return [path.stat().st_size for path in store.folder.glob("*.safetensors")]


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_contexts_of_one_beginning_take_its_blocks_once(any_model, store, count):
    cache, ids = document(any_model)
    whole, blocks = store.save(cache, ids, "document"), cache.groups[0].store.dram_bytes
    assert not store.path(whole).stat().st_mode & 0o222
    stored, expected = [], {}
    for seed in range(count):
        fork, tokens = with_question(any_model, cache, ids, 50 + seed)
        stored.append(store.save(fork, tokens, f"question {seed}"))
        if seed % 11 == 0:
            expected[seed] = goes_on(any_model, fork, [0], seed)
    assert store.total_bytes() == sum(sizes(store))
    # The question's blocks, and those that it completes.
    assert all(each.bytes < whole.bytes - 0.7 * blocks for each in stored)
    assert all(store.verify(each) == [] for each in stored)
    for seed, logits in expected.items():
        loaded = store.load(store.named(f"question {seed}"), any_model, tokenizer=cache.tokenizer)
        assert loaded.tokens[0][:COMMON] == ids
        assert torch.equal(goes_on(any_model, loaded.cache, [0], seed), logits)


def test_a_continued_context_shares_the_blocks_of_the_loaded_one(model, store):
    cache, ids = document(model)
    first = store.save(cache, ids, "first")
    loaded = store.load(first, model)
    said(model, loaded.cache, (torch.tensor([[5, 6, 7]]), torch.empty(1, 0, dtype=torch.int64)))
    assert store.save(loaded.cache, [*ids, 5, 6, 7], "second").bytes < 0.5 * first.bytes


def test_other_tokens_share_nothing(model, store):
    first = store.save(*document(model, 1), "one")
    second = store.save(*document(model, 2), "two")
    assert second.bytes == pytest.approx(first.bytes, rel=0.02)


def test_a_file_stays_while_another_context_needs_it(model, store):
    cache, ids = document(model)
    first = store.save(cache, ids, "document")
    fork, tokens = with_question(model, cache, ids, 7)
    second = store.save(fork, tokens, "question")
    assert store.remove(first) == 0
    assert [each.name for each in store.contexts()] == ["question"]
    loaded = store.load(second, model)
    assert torch.equal(goes_on(model, loaded.cache, [0], 3), goes_on(model, fork, [0], 3))
    assert store.remove(second) == first.bytes + second.bytes
    assert sizes(store) == []


def test_a_name_that_is_saved_again_is_the_new_context(model, store):
    store.save(*document(model, 1), "notes")
    stored = store.save(*document(model, 2, 120), "notes")
    assert [each.tokens for each in store.contexts()] == [120]
    assert sizes(store) == [stored.bytes]
    with pytest.raises(ContextError, match=r"no context 'note' in .*there are: notes"):
        store.named("note")
    with pytest.raises(ContextError, match="is not a name for a context"):
        store.save(*document(model), "two\nlines")


@pytest.mark.parametrize(
    ("name", "said"),
    [("notes", "the context 'notes'"), (None, rf"the context of {COMMON:,} tokens without a name")],
)
def test_a_context_of_other_rules_is_named_as_people_know_it(model, store, name, said):
    stored = store.save(*document(model), name)
    other = tiny_model("llama")
    inject(other, "quest", command_line={"block_size": 16, "max_seq_len": 400})
    file = re.escape(str(store.folder / stored.file))
    with pytest.raises(ContextError, match=rf"^{said} \({file}\) was saved "):
        store.load(stored, other)


def test_the_longest_beginning_is_found(model, store):
    cache, ids = document(model)
    store.save(cache, ids, "document")
    longer, tokens = with_question(model, cache, ids, 7, 80)
    store.save(longer, tokens, "question")
    identity = cache.injection.identity
    found, common = store.longest(identity, [*ids, *random_tokens(30, 8, 1)[0].tolist()])
    assert common in (COMMON, COMMON + 1)
    found, common = store.longest(identity, [*tokens, 3, 4])
    assert (found.name, common) == ("question", 180)
    found, common = store.longest(identity, [*tokens[:150], 3, 4])
    assert found.name == "question"
    assert common >= 150
    found, common = store.longest(identity, [*tokens[:150], 3, 4], whole=True)
    assert (found.name, common) == ("document", COMMON)
    assert store.longest(identity, tokens[:100], whole=True) is None
    assert store.longest(identity, random_tokens(200, 9, 1)[0].tolist()) is None


def test_the_least_recently_used_context_is_removed_first(model, tmp_path):
    with ContextStore(tmp_path / "probe") as probe:
        size = probe.save(*document(model), "probe").bytes
    with ContextStore(tmp_path / "contexts", limit=round(3.5 * size)) as store:
        for seed, name in enumerate("abc"):
            store.save(*document(model, seed), name)
        store.load(store.named("a"), model)
        store.save(*document(model, 4), "d")
        assert {each.name for each in store.contexts()} == {"a", "c", "d"}
        assert len(sizes(store)) == 3
        gone, freed = store.prune(2 * size)
        assert [each.name for each in gone] == ["c"]
        assert freed == pytest.approx(size, rel=0.02)
    with ContextStore(tmp_path / "small", limit=size // 2) as store:
        with pytest.raises(ContextError, match="all contexts may take"):
            store.save(*document(model), "a")
        assert (store.contexts(), sizes(store)) == ([], [])


def save_many(model, store):
    for seed in range(20):
        store.save(*document(model, 2 + seed), f"another {seed}")


def test_an_index_that_has_no_room_is_an_error_and_nothing_is_lost(model, store):
    cache, ids = document(model)
    first = store.save(cache, ids, "document")
    database = store._index._database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    # As on a disk that is full.
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(
        ContextError, match=r"index.sqlite cannot be written .*disk is full.*\. The stored contexts are unchanged"
    ):
        save_many(model, store)
    kept = store.contexts()
    assert kept[-1].file == first.file
    assert len(sizes(store)) == len(kept)
    assert store.verify(first) == []


def test_files_of_no_context_go_when_it_is_pruned(model, store):
    store.save(*document(model), "a")
    for name in ("0" * 32 + ".safetensors", "1" * 32 + ".safetensors.partial"):
        (store.folder / name).write_bytes(b"x" * 100)
    (store.folder / "mine.txt").touch()
    assert store.prune() == ([], 200)
    assert sorted(os.listdir(store.folder))[1:] == ["index.sqlite", "mine.txt"]


@pytest.mark.parametrize("damage", ["gone", "garbage", "another version"])
def test_an_unusable_index_is_rebuilt(model, tmp_path, damage):
    folder = tmp_path / "contexts"
    with ContextStore(folder) as store:
        cache, ids = document(model)
        store.save(cache, ids, "document")
        store.save(*with_question(model, cache, ids, 7), "question")
    path = folder / "index.sqlite"
    if damage == "gone":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"no database " * 500)
    else:
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
        database.close()
    if damage == "gone":
        with ContextStore(folder, makes=False) as store:
            assert {each.name for each in store.contexts()} == {"document", "question"}
            assert store.prune() == ([], 0)
        assert not path.exists()
    with ContextStore(folder) as store:
        assert {each.name for each in store.contexts()} == {"document", "question"}
        store.remove(store.named("document"))
        loaded = store.load(store.named("question"), model)
        assert loaded.cache.lengths == [COMMON + 9]


def test_blocks_that_the_index_takes_for_others_are_not_shared(model, store):
    cache, ids = document(model)
    store.save(cache, ids, "document")
    with sqlite3.connect(store.folder / "index.sqlite") as database:
        database.execute("UPDATE blocks SET row = (row + 1) % 20")
    database.close()
    fork, tokens = with_question(model, cache, ids, 7)
    loaded = store.load(store.save(fork, tokens, "question"), model)
    assert torch.equal(goes_on(model, loaded.cache, [0], 3), goes_on(model, fork, [0], 3))


def test_damage_in_a_file_of_common_blocks_is_named_and_recomputed(model, store, caplog):
    cache, ids = document(model)
    first = store.save(cache, ids, "document")
    second = store.save(*with_question(model, cache, ids, 7), "question")
    content = bytearray(store.path(first).read_bytes())
    content[content.index(cache.layers[1].pool.values[12, 0, 0].numpy().tobytes())] ^= 64
    store.path(first).unlink()
    store.path(first).write_bytes(content)
    assert [line.partition(": ")[2] for line in store.verify(second)] == ["block 12 of blocks/0/1/values is damaged"]
    loaded = store.load(second, model)
    assert loaded.computed == COMMON + 9 - 48
    assert "tokens 48 to 51" in caplog.text
    store.path(first).unlink()
    assert store.load(second, model).computed == COMMON + 9
