"""Shares of the attention, and how few blocks reach one, against torch."""

import math

import numpy as np
import pytest
import torch
from numba import njit

from hetero_kv.cpu_ops.chosen_blocks import LARGEST_SOFTMAX, SOFTMAX, reduced_scores
from hetero_kv.cpu_ops.estimated_masses import estimated_shares, fewest_blocks, softmax_and_shares

ROWS, KV_HEADS, GROUP, BLOCKS = 2, 2, 3, 9


@njit
def reduced(scores, shared, reduce):
    return reduced_scores(scores, shared, reduce)


def masses(seed, size=3.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (ROWS, KV_HEADS, GROUP, BLOCKS), (ROWS, KV_HEADS, GROUP), (ROWS, KV_HEADS, GROUP)
    return [torch.randn(shape, generator=generator) * size for shape in shapes]


def expected_shares(of_blocks, beside, elsewhere, shared):
    everything = torch.cat([of_blocks, beside[..., None], elsewhere[..., None]], -1).softmax(-1)
    together = (1, 2) if shared else 2
    means = everything.mean(together).reshape(-1, BLOCKS + 2)
    return means[:, :BLOCKS], means[:, BLOCKS]


@pytest.mark.parametrize("shared", [False, True])
def test_shares_are_of_everything_that_receives_attention(shared):
    problem = masses(1)
    problem[0][0, 1, 2, 4], problem[1][1, 0, 1], problem[2][0, 0, 0] = -math.inf, -math.inf, -math.inf
    expected = expected_shares(*problem, shared)
    for found, reference in zip(estimated_shares(*[each.numpy() for each in problem], shared), expected, strict=True):
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduce", [SOFTMAX, LARGEST_SOFTMAX])
@pytest.mark.parametrize("lower", [0.0, 200.0])
def test_a_softmax_and_shares_are_found_at_one_look(shared, reduce, lower):
    # Blocks with negligible mass are ordered too.
    of_blocks, beside, elsewhere = masses(2)
    of_blocks = of_blocks - lower
    arrays = [each.numpy() for each in (of_blocks, beside, elsewhere)]
    found = softmax_and_shares(*arrays, shared, reduce == LARGEST_SOFTMAX)
    expected = reduced(arrays[0], shared, reduce), *expected_shares(of_blocks, beside, elsewhere, shared)
    for part, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(part, reference, rtol=1e-5, atol=1e-7)


def test_the_fewest_blocks_reach_a_target_ties_in_their_order():
    scores = np.array([[0.1, 0.4, 0.2, 0.2, 0.2, -np.inf]], np.float32)
    shares = np.array([[0.1, 0.2, 0.05, 0.3, 0.1, 0.2]], np.float32)

    def count(target, least=0, most=9, before=0.0):
        return int(fewest_blocks(scores, shares, np.array([before], np.float32), target, least, most)[0])

    assert [count(target) for target in (0.1, 0.2, 0.25, 0.26, 0.54, 0.56, 0.66)] == [1, 1, 2, 3, 3, 4, 5]
    # An unreachable target takes all allowed tokens, and the limits apply to every target.
    assert count(0.9) == 5
    assert count(0.9, most=2) == 2
    assert count(0.1, least=3) == 3
    assert count(0.5, before=0.6) == 0
    assert count(0.5, before=0.6, least=1) == 1
