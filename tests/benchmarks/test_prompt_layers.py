"""The benchmark of fused prefill layers uses them in exactly one of its two measurements."""

from __future__ import annotations

import torch

from benchmarks.prompt_layers import measured
from hetero_kv import inject
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from tests.support.tiny_models import tiny_model


def test_both_ways_are_measured(monkeypatch):
    model, taken, way = tiny_model("qwen2"), [], FusedPrefillLayer.__call__
    monkeypatch.setattr(FusedPrefillLayer, "__call__", lambda self, *args: (taken.append(self), way(self, *args))[1])
    inject(model, "dense", command_line={"max_seq_len": 64, "chunk_size": 32})
    own, short = measured(model, torch.arange(2, 42)[None], repeats=2)
    assert own > 0
    assert short > 0
    # Two chunks in three layers, once in each round.
    assert len(taken) == 12
