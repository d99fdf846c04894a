"""CaM keeps entries, and adds values to them, as its paper says."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hetero_kv import eject
from hetero_kv.families.bounded.entries import no_entries
from hetero_kv.families.bounded.eviction.cam import CaM, CaMSettings
from hetero_kv.gpu_ops.draws import uniform
from tests.eviction.bounded_runs import bounded, tokens
from tests.eviction.dense_policies import probabilities
from tests.eviction.merged_runs import passes, turns
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

BUDGET, RECENT, SEED = 40, 10, 5


def reference(calls, layer_idx, scale):
    """(positions, values) of one layer's heads after each pass, with one evicted value merged after the other."""
    entries = None
    for q, k, v in calls:
        if entries is None:
            entries = [[] for _ in k]
        first = max((entry[2] for entry in entries[0]), default=-1) + 1
        for head, keys, values in zip(entries, k.double(), v.double(), strict=True):
            head += [[key, value, first + i, 0.0, 0] for i, (key, value) in enumerate(zip(keys, values, strict=True))]
        keys = torch.stack([torch.stack([entry[0] for entry in head]) for head in entries])
        seen = probabilities(q, keys, scale)
        for number, head in enumerate(entries):
            for i, entry in enumerate(head):
                entry[3] += float(seen[number, :, :, i].sum())
                entry[4] += min(q.shape[1], len(head) - i)
            recent = head[-RECENT:]
            by_sum = sorted(range(len(head) - RECENT), key=lambda i, head=head: -head[i][3])
            gone = [head[i] for i in by_sum[BUDGET - RECENT :]]
            recent_mean = sum(entry[3] / entry[4] for entry in recent) / RECENT
            for _, value, position, total, queries in gone:
                at = torch.full((1, number + 1, 1), position)
                if float(uniform(at, SEED, layer_idx)[0, number]) < total / queries / recent_mean:
                    for entry in recent:
                        entry[1] = entry[1] + value / RECENT
            entries[number] = [entry for entry in head if all(entry is not one for one in gone)]
        yield [[entry[2] for entry in head] for head in entries], [[entry[1] for entry in head] for head in entries]


@pytest.mark.parametrize(("architecture", "heads"), with_few([("llama", {}), ("qwen3", {"num_attention_heads": 6})]))
def test_the_entries_and_what_is_added_to_their_values_are_those_of_the_reference(
    received,
    architecture,
    heads,
):
    model = tiny_model(architecture, **heads)
    cache = bounded(model, policy="cam", budget=BUDGET, recent_ratio=RECENT / BUDGET, seed=SEED)
    with torch.no_grad():
        entries = []
        for part in turns():
            model(part, past_key_values=cache)
            entries.append([layer.entries for layer in cache.layers])
    for index in range(len(cache.layers)):
        scale = model.model.layers[index].self_attn.scaling
        steps = reference(passes(received[index]), index, scale)
        for step, (positions, values) in zip(entries, steps, strict=True):
            assert step[index].positions[0].tolist() == positions
            expected = torch.stack([torch.stack(head) for head in values])
            torch.testing.assert_close(step[index].values[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_another_seed_keeps_the_same_entries_with_other_values_and_h2o_keeps_them_unmerged():
    model = tiny_model("llama")
    kept = {}
    for name, settings in {"cam": {"seed": 1}, "other": {"seed": 2}, "again": {"seed": 1}, "h2o": {}}.items():
        policy = name if name == "h2o" else "cam"
        cache = bounded(model, policy=policy, budget=BUDGET, **settings)
        with torch.no_grad():
            model(tokens(117), past_key_values=cache)
        kept[name] = cache.layers[0].entries
        eject(model)
    assert all(entries.positions.equal(kept["cam"].positions) for entries in kept.values())
    assert kept["cam"].values.equal(kept["again"].values)
    half = BUDGET // 2
    for name in ("other", "h2o"):
        assert not kept["cam"].values[:, :, half:].equal(kept[name].values[:, :, half:])
        assert kept["cam"].values[:, :, :half].equal(kept[name].values[:, :, :half])


@cache
def added_to_recent(name, recent, at_once):
    """All values 1, each evicted merged, in entries of this dtype: what is added to the last `recent` of them."""
    steps = recent + 50
    policy = CaM(CaMSettings(budget=recent + 16, recent_ratio=recent / (recent + 16)), layer_idx=0, num_layers=1)
    kind = getattr(torch, name)
    entries = no_entries(torch.zeros(1, 2, 0, 4, dtype=kind), torch.zeros(1, 2, 0, 4, dtype=kind))
    entries = entries.with_room(recent + 16 + steps)
    for position in range(0, recent + 16 + steps, at_once):
        new = 2 * [torch.ones(1, 2, at_once, 4, dtype=kind)]
        entries = entries.with_room(at_once, spare=64).grown(*new, position)
        like = torch.ones(1, 2, entries.num_entries)
        entries = entries.scored(received=like, queries=like)
        if entries.num_entries > recent + 16:
            entries = policy.evict(entries, recent + 16)
    return (entries.values.float() - 1)[0, 0, -recent:, 0]


@pytest.mark.parametrize(
    ("dtype", "recent", "at_once"),
    with_few(
        [("bfloat16", 1024, 1), ("bfloat16", 1024, 3), ("float16", 1024, 1), ("bfloat16", 100, 1), ("bfloat16", 7, 1)],
        quick=[("bfloat16", 1024, 3), ("bfloat16", 7, 1)],
    ),
)
def test_sums_in_half_precision_equal_those_in_float32(dtype, recent, at_once):
    """What is added to an entry grows with the tokens that it was recent for."""
    before, after = (added_to_recent(name, recent, at_once) for name in ("float32", dtype))
    assert float(before.mean()) > 0.3
    assert float(after.sum() / before.sum()) == pytest.approx(1, abs=0.05)
    # Those that were recent for longest first; the last had hardly anything yet.
    parts = [float(abs(a.mean() / b.mean() - 1)) for a, b in zip(after.chunk(7), before.chunk(7), strict=True)]
    assert max(parts[:-1]) < 0.15


def test_draws_are_spread_evenly_and_differ_by_layer_head_and_seed():
    positions = torch.arange(20000).expand(1, 2, -1)
    draws = uniform(positions, 0, 0)
    assert float((torch.histc(draws, bins=10, min=0, max=1) / 4000 - 1).abs().max()) < 0.05
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    for one, other in (
        (draws[:, 0], draws[:, 1]),
        (draws, uniform(positions, 0, 1)),
        (draws, uniform(positions, 1, 0)),
    ):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.03
