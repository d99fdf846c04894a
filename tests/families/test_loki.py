"""Loki equals its paper's algorithm in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.support.token_problem import BLOCK, END, FIRST, TokenProblem

pytestmark = pytest.mark.usefixtures("one_thread")


def reference(problem, components, budget):
    """Algorithm 1 over keys of the blocks that entered the Context first, with a sink and a window besides."""
    first_keys = problem.keys[:, :, FIRST * BLOCK : (END - 2) * BLOCK]
    centred = first_keys - first_keys.mean(dim=2, keepdim=True)
    basis = torch.linalg.svd(centred, full_matrices=False).Vh[:, :, :components].transpose(2, 3)
    products = (problem.q @ basis) @ (problem.keys @ basis).transpose(2, 3) * problem.dim**-0.5
    capped = problem.softcap * torch.tanh(products / problem.softcap) if problem.softcap else products
    context = problem.in_context
    ranked = capped.masked_fill(~context, -torch.inf).softmax(dim=3).mean(dim=2)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(2, ranked.topk(budget, dim=2).indices, True) | ~context
    return problem.scores.masked_fill(~chosen[:, :, None], -torch.inf).softmax(dim=3) @ problem.values


@pytest.mark.parametrize(("kv_type", "softcap"), [("FP32", 0.0), ("FP32", 5.0)])
def test_a_step_is_that_of_the_algorithm(kv_type, softcap):
    problem = TokenProblem("loki", softcap=softcap, kv_type=kv_type, key_components=6, token_budget=13)
    answer, out, _ = problem.answered()
    torch.testing.assert_close(out, reference(problem, 6, 13), rtol=1e-4, atol=1e-4)
    assert answer.tokens == 13
    assert answer.read == 88 * 6 * 2 * 4
    assert answer.share is None


def test_shares_of_components_and_of_tokens():
    problem = TokenProblem("loki")
    answer, out, _ = problem.answered()
    assert answer.tokens == 22
    torch.testing.assert_close(out, reference(problem, 4, 22), rtol=1e-4, atol=1e-4)


def test_the_first_components_score_as_no_others_would():
    """Of keys that differ in two directions alone, two components say everything."""
    problem = TokenProblem("loki", key_components=2, token_budget=9, low_rank=2)
    _, out, _ = problem.answered()
    every = TokenProblem("loki", key_components=16, token_budget=9, low_rank=2)
    torch.testing.assert_close(out, every.answered()[1], rtol=1e-4, atol=1e-4)
