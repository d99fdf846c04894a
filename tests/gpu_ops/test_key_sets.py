"""Sets of keys as tensors are the runs of a CPU, and are chosen as its kernels choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.cpu_ops import block_means as block_means_of
from hetero_kv.cpu_ops import vertical_slash_scores
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK, ranges_of, runs_of_heads
from hetero_kv.gpu_ops.key_sets import (
    BEYOND,
    KeySets,
    block_means,
    distances_within,
    of_largest,
)


def masks_of_runs(runs, starts, total):
    """[lists, total] bool, the tokens of each list of runs."""
    masks = torch.zeros(len(starts) - 1, total, dtype=torch.bool)
    for item, mask in enumerate(masks):
        for first, stop in runs[starts[item] : starts[item + 1]]:
            mask[first:stop] = True
    return masks


def some(generator, size, share):
    return torch.from_numpy(generator.random(size) < share)


@given(
    past=st.integers(0, 200),
    n=st.integers(1, 200),
    shares=st.tuples(*[st.sampled_from([0.0, 0.01, 0.2, 1.0])] * 2),
    count=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_sets_are_the_runs_of_a_cpu(past, n, shares, count, seed):
    generator, total = np.random.default_rng(seed), past + n
    blocks, key_blocks = -(-n // QUERY_BLOCK), -(-total // QUERY_BLOCK)
    tokens, distances = (some(generator, (1, 2, total), share) for share in shares)
    distances[..., 0] = True
    listed = torch.from_numpy(generator.integers(0, key_blocks, (1, 2, blocks, max(1, count)), dtype=np.int32))
    counts = torch.from_numpy(generator.integers(0, count, (1, 2, blocks), dtype=np.int32, endpoint=True))
    sets = KeySets.of(tokens, distances, listed, counts, past, n)

    lines, bands = (
        [ranges_of(np.flatnonzero(each), 0) for each in masks[0].numpy()] for masks in (tokens, distances)
    )  # fmt: skip
    besides = np.where(np.arange(listed.shape[3]) < counts[0, ..., None].numpy(), listed[0].numpy(), -1)
    runs, starts = runs_of_heads(lines, bands, list(np.sort(besides, axis=-1)), past, n)
    assert torch.equal(sets.seen()[0].flatten(0, 1), masks_of_runs(runs, starts, total))


@given(past=st.integers(0, 150), n=st.integers(1, 150), seed=st.integers(0, 99))
def test_lists_name_the_sets(past, n, seed):
    generator, total = np.random.default_rng(seed), past + n
    tokens, distances = (some(generator, (2, 1, total), 0.1) for _ in range(2))
    blocks = torch.zeros(2, 1, -(-n // QUERY_BLOCK), 1, dtype=torch.int32)
    sets = KeySets.of(tokens, distances, blocks, blocks[..., 0], past, n)
    by_token, by_offset, stops = sets.token_lists(), sets.offset_lists(), sets.stops.tolist()
    named = torch.zeros_like(sets.seen())
    for row in range(2):
        for block, stop in enumerate(stops):
            seen = by_token.numbers[0, row, 0][: by_token.counts[row, 0, block]].long()
            assert seen.tolist() == torch.nonzero(tokens[row, 0, :stop])[:, 0].tolist()
            named[row, 0, block, seen] = True
            variant = 1 if n % QUERY_BLOCK and block == len(stops) - 1 else 0
            away = by_offset.numbers[variant, row, 0][: by_offset.counts[row, 0, block]].long()
            named[row, 0, block, stop - 1 - away] = True
    assert torch.equal(named, sets.seen())
    # A kernel reads whole tiles of up to 64 numbers.
    assert by_token.numbers[..., total:-1].unique().tolist() == [BEYOND]
    assert by_token.numbers.shape[-1] - 1 - total == by_offset.numbers.shape[-1] - 1 - sets.offsets.shape[-1] == 64


@given(total=st.integers(64, 700), budget=st.integers(0, 700), count=st.integers(0, 300), seed=st.integers(0, 99))
def test_distances_are_taken_as_on_a_cpu(total, budget, count, seed):
    generator = np.random.default_rng(seed)
    orders = np.stack([generator.permutation(total)[: min(count, total)] for _ in range(2)])
    limits = np.array([orders.shape[1], orders.shape[1] // 2])
    expected = torch.zeros(2, total, dtype=torch.bool)
    for row, (order, limit) in enumerate(zip(orders, limits, strict=True)):
        taken = vertical_slash_scores.distances_within(order[:limit].copy(), QUERY_BLOCK, QUERY_BLOCK, budget)
        expected[row, taken] = True
    budgets = torch.full((2,), budget)
    found = distances_within(torch.from_numpy(orders), torch.from_numpy(limits), budgets, total)
    # The nearest are seen always.
    assert torch.equal(found[:, QUERY_BLOCK:], expected[:, QUERY_BLOCK:])


def test_the_largest_are_as_many_as_each_head_has():
    values = torch.tensor([[[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 1.0]]])
    found = of_largest(values, torch.tensor([1, 3]), 3)
    assert found.tolist() == [[[True, False, False, False], [False, True, True, True]]]
    assert not of_largest(values, torch.tensor([0, 0]), 0).any()


@pytest.mark.parametrize(("past", "n"), [(0, 64), (0, 30), (128, 64), (100, 90), (70, 20), (20, 10)])
def test_block_means_are_a_cpus(past, n):
    generator = torch.Generator().manual_seed(0)
    before, new = (torch.randn(1, 2, tokens, 16, generator=generator) for tokens in (past, n))
    expected = torch.from_numpy(block_means_of.block_means(before.numpy(), new.numpy(), QUERY_BLOCK))
    torch.testing.assert_close(block_means(before, new), expected)
