"""Fixtures for forwards that fail half-way."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv.families.retrieval import short_turn


@pytest.fixture
def short_turns_behind_any_past(monkeypatch):
    """Tiny models have short pasts."""
    monkeypatch.setattr(short_turn, "LEAST_PAST", 1)


@pytest.fixture
def one_thread_and_no_collections():
    """Threads would wait for each other longer than they work; the garbage collector comes at moments of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)
