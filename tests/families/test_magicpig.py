"""MagicPIG equals its paper's formulas in plain torch, and its estimates are right on average over seeds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_kv.families.token_retrieval.choosers.magicpig import MagicPIG, sampling_chance
from tests.support.slow_variants import with_slow
from tests.support.token_problem import END, FIRST, LARGER, TokenProblem

pytestmark = pytest.mark.usefixtures("one_thread")


def reference(problem, bits, tables):
    """Section 4.2 and algorithm 1, with the chooser's hyperplanes: what is attended to, and which are sampled."""
    planes = problem.chooser._planes[problem.dim].view(problem.dim, tables, bits)
    centre = problem.keys[:, :, FIRST * problem.block : (END - 2) * problem.block].mean(dim=2, keepdim=True)
    centred = problem.keys - centre
    sides = [torch.einsum("...d,dlk->...lk", vectors, planes) > 0 for vectors in (problem.q, centred)]
    agree = (sides[0][:, :, :, None] == sides[1][:, :, None]).all(dim=-1).sum(dim=-1)
    sampled = (agree >= 2) & problem.in_context
    cosine = torch.cosine_similarity(problem.q[:, :, :, None], centred[:, :, None], dim=-1).double()
    p = (1 - torch.acos(cosine) / math.pi) ** bits
    u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
    log_weights = torch.where(sampled, -u.log(), -torch.inf).masked_fill(~problem.in_context, 0)
    return (problem.scores + log_weights).softmax(dim=3).float() @ problem.values, sampled


@pytest.mark.parametrize(
    ("kv_type", "bits", "tables"),
    with_slow([("FP32", 4, 20), ("FP32", 10, 150), ("BF16", 3, 9)], slow=[("BF16", 3, 9)]),
)
def test_a_step_is_that_of_the_formulas(kv_type, bits, tables):
    problem = TokenProblem("magicpig", kv_type=kv_type, hash_bits=bits, hash_tables=tables, **LARGER.get(kv_type, {}))
    answer, out, _ = problem.answered()
    expected, sampled = reference(problem, bits, tables)
    assert answer.tokens == pytest.approx(float(sampled.sum(dim=3).float().mean()))
    assert 0 < answer.tokens < problem.request.tokens
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


def test_the_chance_is_how_often_two_vectors_collide_twice():
    cosine = torch.tensor([-1.0, -0.5, 0.0, 0.5, 0.9])
    p = (1 - torch.acos(cosine.double()) / math.pi) ** 3
    drawn = torch.rand(200_000, 1, 8, generator=torch.Generator().manual_seed(0)) < p[:, None]
    found = sampling_chance(cosine, 3, 8)
    torch.testing.assert_close(found, (drawn.sum(dim=2) >= 2).float().mean(dim=0), rtol=0.03, atol=0.003)
    assert float(sampling_chance(torch.ones(()), 10, 150)) == 1


def with_seed(problem, seed):
    problem.chooser = MagicPIG(replace(problem.settings, seed=seed), layer_idx=0)
    problem.finalize()
    return problem


def test_the_estimate_is_unbiased_over_seeds():
    """Numerator and denominator of the attention to the Context, each on average; the newest are exact."""
    problem = TokenProblem("magicpig", hash_bits=3, hash_tables=12)
    scores = problem.scores[..., problem.in_context]
    values = problem.values[:, :, problem.in_context]
    total, expected = scores.exp().sum(dim=3), scores.exp() @ values
    totals, sums = [], []
    for seed in range(100):
        with_seed(problem, seed)
        answer = problem.chooser.attend(problem.request)
        totals.append(answer.lse.exp())
        sums.append(answer.lse.exp()[..., None] * answer.out)
    for drawn, exact in ((totals, total), (sums, expected)):
        stacked = torch.stack(drawn)
        error = stacked.std(dim=0) / len(drawn) ** 0.5
        # Of some hundred numbers none is off by five standard errors, and they are not off on average.
        off = (stacked.mean(dim=0) - exact) / error
        assert float(off.abs().max()) < 5
        assert float(off.mean().abs()) < 0.5
    assert 0.02 < float((torch.stack(totals).std(dim=0) / total).mean()) < 1


def test_a_seed_draws_the_same_sample_again():
    problem = TokenProblem("magicpig")
    answers = [with_seed(problem, seed).answered()[1] for seed in (0, 1, 0)]
    assert torch.equal(answers[0], answers[2])
    assert not torch.allclose(answers[0], answers[1])


@pytest.mark.parametrize("seed", range(6))
def test_a_key_that_is_the_centre_counts_as_one_at_a_right_angle(seed):
    """As the first that enters the Context is, where blocks have one token and enter while answering."""
    problem = TokenProblem("magicpig", seed=seed, hash_bits=4, hash_tables=60)
    request = problem.request._replace(known={"centre": problem.keys[:, :, FIRST * problem.block].contiguous()})
    problem.chooser.finalize(problem.pool, request.table, FIRST, END, request.known)
    positions, counts = np.zeros((2, 4, 1), np.int32), np.ones((2, 4), np.int32)
    chances = problem.chooser._chances(request, problem.q, positions, counts)
    torch.testing.assert_close(chances, sampling_chance(torch.zeros(chances.shape), 4, 60))
