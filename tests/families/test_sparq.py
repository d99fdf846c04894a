"""SparQ equals its paper's algorithm in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.support.slow_variants import with_few
from tests.support.token_problem import DIM, LARGER, TokenProblem

pytestmark = pytest.mark.usefixtures("one_thread")


def reference(problem, components, budget, mean_value):
    """Algorithm 1, with a sink and a window that are attended to, and the mean of the Context's values."""
    q, context = problem.q, problem.in_context
    largest = q.abs().sum(dim=2, keepdim=True).topk(components, dim=3).indices.expand(-1, -1, q.shape[2], -1)
    kept = torch.zeros_like(q).scatter_(3, largest, q.gather(3, largest))
    temperature = (problem.dim * kept.abs().sum(dim=3, keepdim=True) / q.abs().sum(dim=3, keepdim=True)).sqrt()
    products = kept @ problem.keys.transpose(2, 3) / temperature
    coarse = (problem.softcap * torch.tanh(products / problem.softcap) if problem.softcap else products).softmax(dim=3)
    ranked = coarse.sum(dim=2).masked_fill(~context, -1)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(2, ranked.topk(budget, dim=2).indices, True) | ~context
    scores = problem.scores.masked_fill(~chosen[:, :, None], -torch.inf)
    out = scores.softmax(dim=3) @ problem.values
    if not mean_value:
        return out
    share = (coarse * chosen[:, :, None]).sum(dim=3, keepdim=True)
    return share * out + (1 - share) * problem.values[:, :, context].mean(dim=2)[:, :, None]


@pytest.mark.parametrize(
    ("kv_type", "mean_value", "softcap"),
    with_few(
        [("FP32", True, 0.0), ("FP32", False, 5.0), ("BF16", True, 0.0)],
        quick=[("FP32", True, 0.0), ("FP32", False, 5.0)],
    ),
)
def test_a_step_is_that_of_the_algorithm(kv_type, mean_value, softcap):
    settings = {"query_components": 5, "token_budget": 13, "mean_value": mean_value}
    problem = TokenProblem("sparq", softcap=softcap, kv_type=kv_type, **settings, **LARGER.get(kv_type, {}))
    answer, out, _ = problem.answered()
    torch.testing.assert_close(out, reference(problem, 5, 13, mean_value), rtol=1e-4, atol=1e-4)
    assert answer.tokens == 13
    # Five components of keys in the Context, and whole keys elsewhere: components are no faster to find there.
    size, block, dim = problem.pool.keys.element_size(), problem.block, problem.dim
    means = 11 * 2 * dim * 4 if mean_value else 0
    assert answer.read == (11 * block * 5 + 3 * block * dim) * 2 * size + means


def test_a_share_of_the_query_and_of_the_context():
    problem = TokenProblem("sparq", query_components=0.25, token_budget=0.1)
    answer, out, _ = problem.answered()
    assert answer.tokens == 9
    torch.testing.assert_close(out, reference(problem, 4, 9, True), rtol=1e-4, atol=1e-4)


def test_the_share_that_is_counted_is_what_the_coarse_scores_say():
    problem = TokenProblem("sparq", query_components=DIM, token_budget=20)
    answer, _, _ = problem.answered()
    # With all components the scores are the true ones.
    covered = torch.logaddexp(answer.mass, problem.around[1]) - torch.logsumexp(problem.scores, dim=3)
    assert answer.share == pytest.approx(float(covered.exp().mean()), abs=1e-5)


def test_a_query_head_of_zeros_looks_at_all_keys_alike():
    problem = TokenProblem("sparq", token_budget=12)
    problem.q[:, :, 0] = 0
    coarse = problem.chooser.coarse(problem.request)
    assert torch.equal(coarse.scores[:, :, 0], torch.zeros_like(coarse.scores[:, :, 0]))
    answer, out, lse = problem.answered()
    assert all(bool(each.isfinite().all()) for each in (answer.out, answer.lse, out, lse))
