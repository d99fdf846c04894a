"""Fixtures for forwards that fail half-way."""

from __future__ import annotations

import gc

import numba
import pytest
import torch

import hetero_kv.cpu_ops.threads  # noqa: F401  before Numba starts its own
from hetero_kv.families.retrieval import short_turn


@pytest.fixture
def short_turns_behind_any_past(monkeypatch):
    """Tiny models have short pasts."""
    monkeypatch.setattr(short_turn, "LEAST_PAST", 1)


@pytest.fixture
def one_thread_and_no_collections():
    """Threads would wait for each other longer than they work; the garbage collector would run at random moments."""
    # Numba's threads have torch use as many when they start.
    of_kernels, threads = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)
    numba.set_num_threads(of_kernels)
