"""D2O keeps and merges entries, and shares the budget among layers, as its paper says."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv import HeteroCache
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.d2o import D2O, D2OSettings, shared_out
from hetero_kv.families.bounded.eviction.merging import merged, nearest
from hetero_kv.rules.rule_file import load_rules
from tests.eviction.bounded_runs import BUDGET, PROMPT, bounded, tokens
from tests.eviction.dense_policies import probabilities
from tests.eviction.merged_runs import FEW, passes, run, turns
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

GENERATED, SINKS = 90, 4


def d2o(model, chunk_size=16, budget=BUDGET, **settings):
    return bounded(model, chunk_size, policy="d2o", budget=budget, **settings)


class Head:
    """Section 4.2 for one kv head, one token after the other: [(key, value, score, position)]."""

    def __init__(self, recent_ratio, beta):
        self.entries, self.recent_ratio, self.beta, self.threshold = [], recent_ratio, beta, None
        self.merges = 0

    def evict(self, budget):
        recent = round((budget - SINKS) * self.recent_ratio)
        middle = range(SINKS, len(self.entries) - recent)
        important = sorted(middle, key=lambda i: -self.entries[i][2])[: budget - SINKS - recent]
        stay = [i for i in range(len(self.entries)) if i not in middle or i in important]
        gone = [i for i in middle if i not in important]
        keys = torch.stack([entry[0] for entry in self.entries])
        u = torch.nn.functional.cosine_similarity(keys[gone][:, None], keys[stay][None], dim=-1)
        highest, closest = (found.tolist() for found in u.max(1))
        fresh = sum(highest) / len(highest)
        self.threshold = fresh if self.threshold is None else self.beta * fresh + (1 - self.beta) * self.threshold
        kept = []
        for j, i in enumerate(stay):
            into = [g for g in range(len(gone)) if closest[g] == j and highest[g] >= self.threshold]
            self.merges += len(into)
            weights = [math.e, *(math.exp(highest[g]) for g in into)]
            parts = [self.entries[i], *(self.entries[gone[g]] for g in into)]
            key, value = (sum(w * p[x] for w, p in zip(weights, parts, strict=True)) / sum(weights) for x in (0, 1))
            kept.append((key, value, *self.entries[i][2:]))
        self.entries = kept


def reference(passes, budget, scale, recent_ratio, beta):
    """The heads of one layer after each pass."""
    heads, length = None, 0
    for q, k, v in passes:
        heads = heads or [Head(recent_ratio, beta) for _ in k]
        for head, keys, values in zip(heads, k.double(), v.double(), strict=True):
            head.entries += [
                (key, value, 0.0, length + i) for i, (key, value) in enumerate(zip(keys, values, strict=True))
            ]
        length += k.shape[1]
        all_keys = torch.stack([torch.stack([entry[0] for entry in head.entries]) for head in heads])
        for head, sums in zip(heads, probabilities(q, all_keys, scale).sum(2).mean(1).tolist(), strict=True):
            head.entries = [(*e[:2], e[2] + s, e[3]) for e, s in zip(head.entries, sums, strict=True)]
            if len(head.entries) > budget:
                head.evict(budget)
        yield heads


@pytest.mark.parametrize(
    ("architecture", "heads", "recent_ratio", "beta"),
    with_few([("llama", {}, 0.25, 0.7), ("qwen3", {"num_attention_heads": 6}, 0.5, 0.4)]),
)
def test_the_entries_and_what_is_merged_into_them_are_those_of_the_reference(
    received, architecture, heads, recent_ratio, beta
):
    model = tiny_model(architecture, **heads, num_hidden_layers=2)
    cache = d2o(model, sink_tokens=SINKS, recent_ratio=recent_ratio, beta=beta)
    _, kept = run(model, cache, turns(GENERATED))
    merges = 0
    for index, layer in enumerate(cache.layers):
        scale = model.model.layers[index].self_attn.scaling
        steps = reference(passes(received[index]), layer.budget, scale, recent_ratio, beta)
        for step, (layers, expected) in enumerate(zip(kept, steps, strict=True)):
            entries = layers[index]
            for head, found in enumerate(expected):
                keys, values, _, positions = zip(*found.entries, strict=True)
                where = f"layer {index}, head {head}, after {step} generated tokens"
                assert entries.positions[0, head].tolist() == list(positions), where
                for mine, theirs in ((entries.keys, keys), (entries.values, values)):
                    torch.testing.assert_close(
                        mine[0, head].double(),
                        torch.stack(theirs),
                        rtol=1e-4,
                        atol=1e-4,
                        msg=lambda m, w=where: f"{w}: {m}",
                    )
        merges += sum(head.merges for head in expected)
    evictions = 2 * sum(PROMPT + GENERATED - layer.budget for layer in cache.layers)
    assert 0.2 < merges / evictions < 0.8


def test_layers_share_the_budget_by_the_variances_of_the_dense_attention(received):
    model = tiny_model("llama", num_hidden_layers=4)
    cache = d2o(model, budget=0.25)
    with torch.no_grad():
        model(tokens(PROMPT), past_key_values=cache)
    scale = model.model.layers[0].self_attn.scaling
    variances = torch.stack(
        [
            probabilities(q, k, scale).sum(2).mean(1).var(-1, correction=0).mean()
            for q, k, _ in (next(passes(received[index])) for index in range(4))
        ]
    )
    variances = (variances - variances.min()) / (variances.max() - variances.min())
    total = 4 * math.ceil(0.25 * PROMPT)
    expected = torch.softmax(-variances, 0) * total
    assert sum(cache.statistics["cached_entries"]) == total
    assert float((torch.tensor(cache.statistics["cached_entries"]) - expected).abs().max()) < 1
    assert len(set(cache.statistics["cached_entries"])) > 2


def entries_that_received(*sums):
    received = torch.tensor(sums)[None, None]
    empty = torch.zeros(*received.shape, 1)
    return Entries.of(empty, empty, torch.zeros(received.shape, dtype=torch.int64), {"received": received})


def test_variances_as_they_are_leave_the_budget_to_the_layer_that_varies_least():
    layers = [entries_that_received(*[mean] * 50, *[-mean] * 50) for mean in (9.0, 1.0, 30.0)]
    shares = {
        allocation: list(D2O(D2OSettings(allocation=allocation), 0, 3).allocate(layers, [40, 40, 40]))
        for allocation in ("absolute", "relative", "uniform")
    }
    # What is beyond the 100 that the second layer holds goes to the next.
    assert shares == {"absolute": [15, 100, 5], "relative": [48, 53, 19], "uniform": [40, 40, 40]}


@given(st.data())
def test_shares_add_up_within_their_limits_and_fall(data):
    layers = data.draw(st.integers(1, 12))
    falling = data.draw(st.lists(st.floats(0, 1e6), min_size=layers, max_size=layers))
    least = data.draw(st.integers(1, 10))
    most = data.draw(st.lists(st.integers(1, 500), min_size=layers, max_size=layers))
    total = data.draw(st.integers(least * layers, 600 * layers))
    shares = shared_out(total, falling, least, most)
    surplus = max(0, total - sum(most))
    assert sum(shares) == total - surplus % layers
    for share, top in zip(shares, most, strict=True):
        assert min(least, top) <= share <= top + surplus // layers
    by_height = sorted(range(layers), key=lambda i: falling[i])
    for low, high in pairwise(by_height):
        assert shares[low] >= min(shares[high], most[low]) - 1


@pytest.mark.parametrize("allocation", ["relative", "absolute"])
def test_a_covering_budget_is_full_attention(allocation):
    model = tiny_model("llama")
    with torch.no_grad():
        expected = model(torch.cat(turns(batch=2), 1)).logits
    cache = d2o(model, budget=PROMPT + FEW, allocation=allocation)
    with torch.no_grad():
        logits = torch.cat([model(part, past_key_values=cache).logits for part in turns(batch=2)], 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert cache.statistics["cached_entries"] == [PROMPT + FEW] * 3


def test_entries_are_merged_from_the_threshold_on():
    entries = random_entries(30, torch.float32, 2)
    changed = {}
    for threshold in (-1.0, 0.5, 1.0):
        settings = D2OSettings(budget=10, sink_tokens=2, threshold=threshold)
        left = D2O(settings, 0, 1).evict(entries.scored(received=entries.values[..., 0]), 10)
        assert "threshold" not in left.carried
        changed[threshold] = (left.keys != entries.kept(left.positions).keys).any(-1)
    evicted = torch.stack(
        [torch.tensor([i for i in range(30) if i not in row]) for row in left.positions.flatten(0, 1).tolist()]
    )
    similarities, places = nearest(entries.kept(evicted.view(2, 3, 20)).keys, entries.kept(left.positions).keys)
    for threshold, joined in changed.items():
        counts = torch.zeros(2, 3, 10).scatter_add_(-1, places, (similarities >= threshold).float())
        assert joined.equal(counts > 0)
    assert changed[-1.0].sum() > changed[0.5].sum() > changed[1.0].sum() == 0


# Every policy in tests/operators/test_every_policy.py.
@pytest.mark.slow
def test_the_same_again_is_the_same():
    model = tiny_model("llama")
    cache = d2o(model)
    logits, _ = run(model, cache, turns())
    cache.reset()
    assert run(model, cache, turns())[0].equal(logits)
    assert run(model, HeteroCache(model), turns())[0].equal(logits)


def test_a_later_prompt_begins_a_new_threshold():
    model = tiny_model("llama")
    cache = d2o(model)
    run(model, cache, turns())
    moved = cache.layers[0].entries.carried["threshold"]
    with torch.no_grad():
        model(tokens(30, 5), past_key_values=cache)
    assert sum(cache.statistics["cached_entries"]) == 3 * BUDGET
    began = cache.layers[0].entries.carried["threshold"]
    assert began.shape == moved.shape == (1, 2)
    assert not began.equal(moved)


def random_entries(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 3, count, dim, generator=generator).to(dtype) for dim in (8, 6))
    return Entries.of(keys, values, torch.arange(count).expand(2, 3, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 50])
def test_tiles_change_nothing_and_unmerged_entries_stay_bit_for_bit(monkeypatch, count, dtype):
    kept, evicted = random_entries(20, dtype, 0), random_entries(count, dtype, 1)
    whole = nearest(evicted.keys, kept.keys)
    joins = whole[0] >= whole[0].median()
    result = merged(random_entries(20, dtype, 0), evicted, *whole, joins)
    monkeypatch.setattr("hetero_kv.families.bounded.eviction.merging._PAIRS_AT_ONCE", 7 * 2 * 3 * 20)
    tiled = nearest(evicted.keys, kept.keys)
    assert tiled[1].equal(whole[1])
    torch.testing.assert_close(tiled[0], whole[0])
    again = merged(random_entries(20, dtype, 0), evicted, *whole, joins)
    torch.testing.assert_close(again.keys, result.keys)
    torch.testing.assert_close(again.values, result.values)
    joined = torch.zeros(2, 3, 20, dtype=torch.int64).scatter_add_(-1, whole[1], joins.long()) > 0
    assert joined.any()
    assert not joined.all()
    for old, new in ((kept.keys, result.keys), (kept.values, result.values)):
        assert new.dtype == dtype
        assert new[~joined].equal(old[~joined])
        assert (new[joined] != old[joined]).any(-1).all()


def test_the_recipe_has_the_papers_settings():
    rules = load_rules("d2o")
    (settings,) = {rules.operator_settings(rule) for rule in rules.rules} & {D2OSettings()}
    # Section 5.1: N important tokens and M recent ones, N:M = 3:1; beta = 0.7. Section 4.2.2: the threshold is an EMA.
    assert settings.recent_ratio == 1 / (3 + 1)
    assert settings.beta == 0.7
    assert settings.threshold == "ema"
    # The paper names no T; StreamingLLM, whose sinks these are, keeps four.
    assert settings.sink_tokens == 4
