"""A name at an address is one context on every machine."""

from __future__ import annotations

import pytest

from hetero_kv.contexts import uploads
from hetero_kv.engine.errors import ContextError
from tests.contexts.shared.machines import TOKENS, document, objects, upload, wait_until


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
