"""BigBird's pattern: the first tokens, the newest and whole random blocks fill the budget exactly."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hetero_kv.gpu_ops.draws import uniform
from hetero_kv.settings.setting import ConfigError
from tests.eviction.bounded_runs import bounded, tokens
from tests.support.tiny_models import tiny_model

BUDGET, STRIDE, BLOCK, FIRST, LAST, SEED = 40, 23, 4, 8, 12, 3


@cache
def share(block, head, layer_idx):
    """What decides whether a block stays."""
    return float(uniform(torch.full((1, head + 1, 1), block), SEED, layer_idx)[0, head])


def kept(length, head, layer_idx, sizes):
    """The positions that stay of `length` tokens that came in passes of these sizes."""
    entries, seen = [], 0
    for size in sizes:
        entries, seen = entries + list(range(seen, seen + size)), seen + size
        middle = entries[FIRST : len(entries) - LAST]

        def rank(position):
            return -share(position // BLOCK, head, layer_idx), position

        drawn = sorted(middle, key=rank)[: BUDGET - FIRST - LAST]
        entries = sorted({*entries[:FIRST], *drawn, *entries[-LAST:]})
        if seen == length:
            return entries
    raise AssertionError(f"{length} is no end of a pass")


def test_the_kept_entries_are_those_of_the_reference_while_a_prompt_and_an_answer_pass():
    model = tiny_model("qwen3", num_attention_heads=6)
    settings = {"block_size": BLOCK, "global_ratio": FIRST / BUDGET, "recent_ratio": LAST / BUDGET, "seed": SEED}
    cache = bounded(model, policy="bigbird", budget=BUDGET, stride=STRIDE, **settings)
    sizes = [STRIDE] * 5 + [2] + [1] * 30
    with torch.no_grad():
        for length, part in ((117, tokens(117)), *zip(range(118, 148), tokens(30, 1).split(1, dim=1), strict=True)):
            model(part, past_key_values=cache)
            if length % 6:
                continue
            for index, layer in enumerate(cache.layers):
                assert layer.num_entries == BUDGET
                assert layer.entries.positions[0].tolist() == [kept(length, head, index, sizes) for head in range(2)]


def test_random_blocks_are_whole_and_every_head_has_its_own():
    model = tiny_model("llama")
    settings = {"block_size": 6, "global_ratio": 0.25, "recent_ratio": 0.25, "stride": 16}
    cache = bounded(model, policy="bigbird", budget=48, **settings)
    with torch.no_grad():
        model(tokens(180), past_key_values=cache)
    positions = cache.layers[0].entries.positions[0]
    assert not positions[0].equal(positions[1])
    for head in positions.tolist():
        assert head[:12] == list(range(12))
        assert head[-12:] == list(range(168, 180))
        blocks = [position // 6 for position in head[12:-12]]
        assert {blocks.count(block) for block in blocks} == {6}


def test_shares_that_exceed_the_budget_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"recent_ratio is 0\.6.*global_ratio 0\.5.*at most 0\.5"):
        bounded(tiny_model("llama"), policy="bigbird", budget=40, global_ratio=0.5, recent_ratio=0.6)
