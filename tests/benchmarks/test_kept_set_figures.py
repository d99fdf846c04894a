"""The figures of `benchmarks.kept_sets_vs_kvpress`, which compares sets of kept tokens."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kept_sets import overlap, row, thirds


def positions(*heads):
    return torch.tensor(heads)


def test_equal_sets_share_everything_and_are_not_apart():
    kept = positions([0, 3, 5], [1, 2, 9])
    found = overlap(kept, kept.flip(-1), torch.rand(2, 10))
    assert found.shares == (1.0, 1.0)
    assert (found.spread, found.kept) == (0.0, (3, 3))


def test_the_share_is_of_the_greater_set_so_that_a_subset_is_not_equal():
    found = overlap(positions([1, 4]), positions([1, 2, 3, 4]), torch.ones(1, 10))
    assert found.shares == (0.5,)
    assert found.kept == (2, 4)
    assert found.spread == 0


def test_the_spread_is_what_an_exchange_costs_in_the_others_scores():
    scores = torch.tensor([[8.0, 4.0, 3.0, 2.0, 1.0]])
    # 1 was kept by theirs alone, 4 by ours alone, and theirs would have kept 2 at least.
    found = overlap(positions([0, 3, 4]), positions([0, 1, 3]), scores)
    assert found.shares == pytest.approx((2 / 3,))
    assert found.spread == pytest.approx((4.0 - 1.0) / 2.0)


def test_exchanges_between_nearly_equal_scores_have_nearly_no_spread():
    scores = torch.tensor([[1.0, 0.5, 0.5 + 1e-7, 0.1]])
    assert overlap(positions([0, 1]), positions([0, 2]), scores).spread < 1e-6


@pytest.mark.parametrize("layers", [3, 4, 24, 28, 30])
def test_the_thirds_hold_every_layer_once(layers):
    counted = [index for part in thirds(layers).values() for index in range(layers)[part]]
    assert counted == list(range(layers))


def test_a_row_tells_means_by_thirds_the_lowest_and_how_many_sets_are_equal():
    scores = torch.rand(2, 10)
    same = overlap(positions([0, 1], [2, 3]), positions([0, 1], [2, 3]), scores)
    half = overlap(positions([0, 1], [2, 3]), positions([0, 5], [2, 3]), scores)
    found = row([same, same, half])
    assert (found["lower"], found["middle"], found["upper"]) == (1, 1, 0.75)
    assert found["mean"] == pytest.approx(11 / 12)
    assert (found["lowest"], found["equal"], found["sets"], found["kept"]) == (0.5, 5, 6, [2, 2])
