"""A policy whose settings switch off its additions equals the simpler policy."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from hetero_kv.operators import BoundedAttention
from tests.eviction import dense_policies as dense
from tests.eviction.bounded_runs import BUDGET, bounded, passes, tokens
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

# Enough sinks that some would be evicted.
PROMPT, GENERATED, SINKS, RECENT = 117, 60, 20, 9
PARTS = (tokens(PROMPT, batch=2), *tokens(20, 1, 2).split(1, dim=1), tokens(70, 2, 2), *tokens(9, 3, 2).split(1, dim=1))


def answered(model, **kwargs):
    """Logits of two turns, and every layer's entries after each part of them."""
    cache = bounded(model, **kwargs)
    logits, kept = [], []
    with torch.no_grad():
        for part in PARTS:
            logits.append(model(part, past_key_values=cache).logits)
            kept.append([layer.entries for layer in cache.layers])
    eject(model)
    return torch.cat(logits, dim=1), kept


def assert_the_same(mine, theirs):
    """The same logits and entries, to the bit."""
    assert mine[0].equal(theirs[0])
    for here, there in zip(mine[1], theirs[1], strict=True):
        for one, other in zip(here, there, strict=True):
            assert all(getattr(one, name).equal(getattr(other, name)) for name in ("keys", "values", "positions"))


@pytest.mark.parametrize(("architecture", "heads"), with_few([("llama", {}), ("qwen3", {"num_attention_heads": 6})]))
def test_a_flat_pyramid_is_snapkv(architecture, heads):
    model = tiny_model(architecture, **heads)
    settings = {"budget": BUDGET, "recent_tokens": 12, "kernel_size": 5}
    snapkv = answered(model, policy="snapkv", **settings)
    assert_the_same(answered(model, policy="pyramidkv", beta=1, **settings), snapkv)
    steep = answered(model, policy="pyramidkv", beta=2, **settings)
    assert not steep[0].equal(snapkv[0])


@pytest.mark.parametrize(("sub_caches", "same"), [(1, True), (2, False)])
def test_a_cascade_is_streaming_llm_with_as_many_sinks_and_the_same_stride_where_it_has_one_sub_cache(sub_caches, same):
    model = tiny_model("qwen3", num_attention_heads=6)
    settings = {"budget": BUDGET, "sink_tokens": 6, "stride": 23}
    cascade = answered(model, policy="cascade", sub_caches=sub_caches, **settings)
    streaming = answered(model, policy="streaming_llm", **settings)
    if same:
        assert_the_same(cascade, streaming)
    else:
        assert not cascade[0].equal(streaming[0])
        assert not cascade[1][-1][0].positions.equal(streaming[1][-1][0].positions)


@pytest.mark.parametrize(("threshold", "same"), with_few([(1.1, True), ("ema", False), (0.0, False)], quick=2))
def test_d2o_whose_entries_never_merge_is_h2o_where_both_share_the_budget_alike(threshold, same):
    model = tiny_model("llama")
    d2o = {"sink_tokens": 0, "recent_ratio": 0.5, "allocation": "uniform"}
    merging = answered(model, policy="d2o", budget=BUDGET, threshold=threshold, **d2o)
    heavy = answered(model, policy="h2o", budget=BUDGET)
    if same:
        assert_the_same(merging, heavy)
    else:
        assert not merging[0].equal(heavy[0])


class HeavyHitters:
    """D2O's eviction alone (section 4.2.1): sinks, the newest, and the highest column sums."""

    def keep(self, p, marks, budget):
        marks["sum"] = marks["sum"] + p.sum(2).mean(1)
        scores = marks["sum"].clone()
        scores[:, :SINKS] = scores[:, scores.shape[1] - RECENT :] = float("inf")
        return dense.top(scores, budget), marks


def test_with_a_threshold_above_1_entries_stay_as_they_came_and_are_those_of_d2os_eviction(recorded, monkeypatch):
    came = {}
    prefill_chunk = BoundedAttention.prefill_chunk

    def kept(self, layer, step, call):
        came.setdefault(self.layer_idx, []).append((call.k[0], call.v[0]))
        return prefill_chunk(self, layer, step, call)

    monkeypatch.setattr(BoundedAttention, "prefill_chunk", kept)
    model = tiny_model("llama")
    share = RECENT / (BUDGET - SINKS)
    settings = {"sink_tokens": SINKS, "recent_ratio": share, "allocation": "uniform"}
    cache = bounded(model, policy="d2o", budget=BUDGET, threshold=1.0001, **settings)
    steps = []
    with torch.no_grad():
        for part in (tokens(PROMPT), *tokens(GENERATED, 1).split(1, dim=1)):
            model(part, past_key_values=cache)
            steps.append([layer.entries for layer in cache.layers])
    for index in range(3):
        calls = recorded[index]
        sets = dense.kept_positions(HeavyHitters(), passes(calls, [PROMPT] + [1] * GENERATED), BUDGET, calls[0][2])
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*came[index], strict=True))
        for layers, expected in zip(steps, sets, strict=True):
            entries = layers[index]
            assert entries.positions[0].equal(expected)
            for mine, all_of_them in ((entries.keys[0], keys), (entries.values[0], values)):
                assert mine.equal(torch.stack([rows[kept] for rows, kept in zip(all_of_them, expected, strict=True)]))
