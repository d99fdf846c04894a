"""Machines with one address, and the tiny model whose contexts they store."""

from __future__ import annotations

import pytest

from hetero_kv.contexts import cards, chunks, medium
from hetero_kv.contexts.shared_store import SharedContextStore
from tests.contexts.shared.machines import model_of
from tests.support.faulty_files import FaultyFiles


@pytest.fixture(autouse=True)
def always_listed(monkeypatch, one_thread):
    """Listings are never taken for new, chunks are small, and an address that failed is tried again at once."""
    monkeypatch.setattr(cards, "_FRESH_S", 0.0)
    monkeypatch.setattr(cards, "_FRESH_TIMES", 0)
    monkeypatch.setattr(chunks, "_MOST_BYTES", 1 << 14)
    monkeypatch.setattr(medium, "_PAUSES_S", (0.01, 0.01))
    FaultyFiles.reset()
    yield
    FaultyFiles.running.set()


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
