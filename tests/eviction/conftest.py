"""Fixtures that record the chunks of bounded attention."""

from __future__ import annotations

import pytest

from hetero_kv.operators import BoundedAttention


def _recorder(monkeypatch, parts_of):
    calls = {}
    prefill_chunk = BoundedAttention.prefill_chunk

    def recorded(self, layer, step, call):
        calls.setdefault(self.layer_idx, []).append(parts_of(call))
        return prefill_chunk(self, layer, step, call)

    monkeypatch.setattr(BoundedAttention, "prefill_chunk", recorded)
    return calls


@pytest.fixture
def recorded(monkeypatch):
    """layer -> [(q, k, scale)] of every chunk that the operator receives, of the batch's first row."""
    return _recorder(monkeypatch, lambda call: (call.q[0], call.k[0], call.scale))


@pytest.fixture
def received(monkeypatch):
    """layer -> [(q, k, v)] of every chunk that the operator receives, of the batch's first row."""
    return _recorder(monkeypatch, lambda call: (call.q[0], call.k[0], call.v[0]))
