"""Fixtures of engines whose memory is short."""

from __future__ import annotations

import pytest

from hetero_kv.serving import memory
from hetero_kv.serving.swapped import SwapFolder
from tests.serving.short_memory import AHEAD


@pytest.fixture
def short_reserve(monkeypatch):
    """Running requests have memory for few tokens ahead."""
    monkeypatch.setattr(memory, "AHEAD", AHEAD)


@pytest.fixture
def preempted(monkeypatch):
    """The lengths of the sequences that went to the disk."""
    lengths, put = [], SwapFolder.put

    def counting(folder, cache):
        swapped = put(folder, cache)
        lengths.extend([] if swapped is None else [swapped.tokens])
        return swapped

    monkeypatch.setattr(SwapFolder, "put", counting)
    return lengths
