"""What is removed at an address and from the disk cache, and what stays."""

from __future__ import annotations

import pytest

from hetero_kv.contexts import shared_pruning
from hetero_kv.engine.errors import ContextError
from tests.contexts.conversations import said
from tests.contexts.shared.machines import TOKENS, document, fetched, objects, upload
from tests.support.faulty_files import FaultyFiles
from tests.support.small_families import random_tokens


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


def test_a_tenant_keeps_its_newest_contexts(model, machine):
    one = machine("one")
    for seed in range(3):
        upload(one, *document(model, seed), salt="ann", per_tenant=2)
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
