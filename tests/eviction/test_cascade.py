"""Cascading KV cache: a cascade keeps what algorithm 2 keeps, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv import HeteroCache, eject
from hetero_kv.families.bounded.eviction.sub_caches import sub_cache_sizes, survivors
from tests.eviction import dense_policies as dense
from tests.eviction.bounded_runs import bounded, passes, rotation_of, tokens
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

PROMPT, GENERATED, STRIDE, SINKS, GAMMA = 133, 130, 23, 5, 0.99


class SubCaches:
    """Algorithm 2, of one kv head: lists of token numbers, into which one token goes after the other."""

    def __init__(self, sinks, window, count):
        self.limit, self.sinks, self.number = sinks, [], 0
        self.sizes = [window // count + (i < window % count) for i in range(count)]
        self.caches = [[] for _ in self.sizes]

    def add(self, token, score):
        if len(self.sinks) < self.limit:
            self.sinks.append(token)
            return
        has_room = any(len(cache) < size for cache, size in zip(self.caches, self.sizes, strict=True))
        number, self.number = self.number, self.number + 1
        for i, (cache, size) in enumerate(zip(self.caches, self.sizes, strict=True)):
            if has_room or number % 2**i == 0:
                cache.append(token)
                if len(cache) <= size:
                    return
                token = cache.pop(0)
            else:
                if score[token] > score[cache[-1]]:
                    cache[-1] = token
                return

    @property
    def tokens(self):
        return [*self.sinks, *(token for cache in reversed(self.caches) for token in cache)]


class Cascade:
    """Section 3.1, of one layer; its scores are of a stride's end when the stride's tokens enter (algorithm 1)."""

    def __init__(self, sinks, count, budget):
        self.new, self.heads, self.seen = (lambda: SubCaches(sinks, budget - sinks, count)), [], 0

    def keep(self, p, marks, budget):
        for query in range(p.shape[2]):
            marks["sum"] = GAMMA * marks["sum"] + (1 - GAMMA) * p.amax(1)[:, query]
        self.heads = self.heads or [self.new() for _ in p]
        index = []
        for cascade, averages in zip(self.heads, marks["sum"].tolist(), strict=True):
            there = [*cascade.tokens, *range(self.seen, self.seen + p.shape[2])]
            for token in there[len(cascade.tokens) :]:
                cascade.add(token, dict(zip(there, averages, strict=True)))
            index.append([there.index(token) for token in cascade.tokens])
        self.seen += p.shape[2]
        return torch.tensor(index), marks


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 4), st.integers(1, 8), st.integers(0, 30), st.lists(st.integers(1, 70), max_size=40), st.integers(0)
)
def test_a_stride_leaves_what_its_tokens_leave_one_after_the_other(sinks, count, more, strides, seed):
    window, rows = count + more, 3
    generator = torch.Generator().manual_seed(seed % 2**32)
    references = [SubCaches(sinks, window, count) for _ in range(rows)]
    entries, seen = torch.empty(rows, 0, dtype=torch.int64), 0
    for stride in [sinks + window, *strides]:
        entries = torch.cat([entries, torch.arange(seen, seen + stride).expand(rows, -1)], 1)
        # Few values, so that many are equal.
        scores = torch.randint(0, 5, entries.shape, generator=generator).float()
        for reference, row, numbers in zip(references, scores.tolist(), entries.tolist(), strict=True):
            for token in range(seen, seen + stride):
                reference.add(token, dict(zip(numbers, row, strict=True)))
        if entries.shape[1] > sinks + window:
            kept = survivors(scores, sub_cache_sizes(window, count), sinks, seen - sinks)
            assert kept.shape == (rows, sinks + window)
            entries = entries.gather(1, kept)
        seen += stride
        assert entries.tolist() == [reference.tokens for reference in references]


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 100))
def test_sub_caches_share_the_window_and_the_newest_have_the_rest(count, more):
    sizes = sub_cache_sizes(count + more, count)
    assert sum(sizes) == count + more
    assert len(sizes) == count
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("count", with_few([1, 2, 4, 8], quick=[1, 4]))
@pytest.mark.parametrize("stride", [1, 100])
def test_the_tokens_in_the_cache_span_what_equation_4_says(count, stride):
    window, sinks = 8 * count, 4
    sizes = sub_cache_sizes(window, count)
    kept = torch.arange(sinks + window)
    for start in range(sinks + window, 5000, stride):
        kept = torch.cat([kept, torch.arange(start, start + stride)])
        kept = kept[survivors(torch.rand(len(kept)), sizes, sinks, start - sinks)]
    span = int(kept[-1] - kept[sinks] + 1)
    expected = window // count * sum(2 ** (i - 1) for i in range(1, count + 1))
    # The oldest entry of a sub-cache may have lost or won, and may be about to go.
    assert abs(span - expected) < 2**count
    for level, cut in enumerate(kept[sinks:].flip(0).split(8)):
        assert abs(int(cut[0] - cut[-1]) - 7 * 2**level) < 2 ** (level + 1)


@pytest.mark.parametrize(
    ("architecture", "heads", "count", "budget"),
    with_few(
        [
            ("llama", {}, 4, 40),
            ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}, 3, 31),
            ("phi", {"num_key_value_heads": 4}, 8, 75),
        ]
    ),
)
def test_the_kept_entries_are_those_of_algorithm_2(recorded, architecture, heads, count, budget):
    model = tiny_model(architecture, **heads, num_hidden_layers=2)
    cache = bounded(
        model, policy="cascade", budget=budget, stride=STRIDE, sink_tokens=SINKS, sub_caches=count, gamma=GAMMA
    )
    kept = [[], []]
    with torch.no_grad():
        for part in (tokens(PROMPT), *tokens(GENERATED, 1).split(1, dim=1)):
            model(part, past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                assert layer.num_entries == min(budget, layer.length)
                kept[index].append(layer.entries.positions[0])
    sizes = [*[STRIDE] * (PROMPT // STRIDE), PROMPT % STRIDE, *[1] * GENERATED]
    for index, layer in enumerate(cache.layers):
        sets = dense.kept_positions(
            Cascade(SINKS, count, budget),
            passes(recorded[index], sizes),
            budget,
            recorded[index][0][2],
            rotation_of(layer),
        )
        expected = list(sets)[-GENERATED - 1 :]
        wrong = [i for i, (mine, its) in enumerate(zip(kept[index], expected, strict=True)) if not mine.equal(its)]
        assert not wrong, f"layer {index}: after {wrong[0]} generated tokens"
    heads_differ = kept[1][-1]
    assert not heads_differ[0].equal(heads_differ[1])


def streamed(model, *parts, chunk_size=16, **kwargs):
    """Logits of all parts and the positions kept in each layer."""
    cache = bounded(model, chunk_size, **kwargs)
    with torch.no_grad():
        logits = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
    eject(model)
    return logits, [layer.entries.positions for layer in cache.layers]


PARTS = (tokens(90), *tokens(20, 1).split(1, dim=1), tokens(40, 2), *tokens(9, 3).split(1, dim=1))
SMALL = {"policy": "cascade", "budget": 40, "sink_tokens": 6, "stride": STRIDE}


def test_a_covering_budget_is_full_attention():
    model = tiny_model("qwen2")
    with torch.no_grad():
        expected = model(torch.cat(PARTS, 1)).logits
    logits, positions = streamed(model, *PARTS, **{**SMALL, "budget": 159})
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert positions[0].shape[2] == 159


def test_the_same_entries_are_kept_again_and_however_strides_are_chunked():
    model = tiny_model("llama", num_attention_heads=6, hidden_size=96, num_hidden_layers=2)
    logits, positions = streamed(model, *PARTS, **SMALL)
    again, kept_again = streamed(model, *PARTS, **SMALL)
    assert logits.equal(again)
    _, chunked = streamed(model, *PARTS, chunk_size=5, **SMALL)
    for mine, same, small in zip(positions, kept_again, chunked, strict=True):
        assert mine.equal(same)
        assert mine.equal(small)


def test_a_fork_goes_on_in_the_same_schedule():
    model = tiny_model("llama")
    cache = bounded(model, **SMALL)
    with torch.no_grad():
        model(tokens(77), past_key_values=cache)
        fork, alone = cache.fork(), HeteroCache(model)
        model(tokens(77), past_key_values=alone)
        for part in tokens(21, 4).split(1, dim=1):
            model(part, past_key_values=cache)
        model(tokens(31, 5), past_key_values=fork)
        model(tokens(31, 5), past_key_values=alone)
    for mine, its in zip(fork.layers, alone.layers, strict=True):
        assert mine.entries.positions.equal(its.entries.positions)
