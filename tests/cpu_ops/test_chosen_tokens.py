"""Selection of single tokens within candidate blocks equals a short reference in torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import chosen_tokens
from hetero_kv.cpu_ops.chosen_blocks import LARGEST, LARGEST_SOFTMAX, MEAN, SOFTMAX
from hetero_kv.cpu_ops.parallel_region import call_region
from hetero_kv.cpu_ops.retrieval_step import BlockChoice
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, EVERYTHING
from tests.cpu_ops.estimating_problems import (
    BLOCK,
    BLOCKS,
    CONTEXT,
    END,
    FIRST,
    KV_HEADS,
    ROWS,
    Problem,
    assert_same,
    scores_of,
    spread,
    taken,
)
from tests.support.slow_variants import with_few

AROUND = [*range(FIRST), *range(END, BLOCKS)]


def reference(problem, choice, *, shared=False, softcap=0.0, estimates=True, beside=-math.inf, allowed_blocks=None):
    """Per row: candidates of each list, out, lse, and the mass of what was attended to and of everything."""
    inside, lists, blocks = slice(FIRST, END), 1 if shared else KV_HEADS, choice.tokens // BLOCK
    for row in range(ROWS):
        exact, mean, likely = scores_of(problem, row, softcap)
        window = exact[:, :, AROUND].flatten(2).logsumexp(-1)
        seen = torch.logaddexp(window, torch.tensor(beside).double())
        exact, mean, likely = exact[:, :, inside], mean[:, :, inside], likely[:, :, inside]
        looked, masses = exact.logsumexp(-1), spread(mean, likely)
        nothing = torch.full_like(seen, -math.inf)
        if allowed_blocks is not None:
            candidates = [[b for b in own if b >= 0] for own in allowed_blocks[row]]
        else:
            if choice.rerank == 0:
                masses = looked.clone()
            by = masses if choice.rerank == 0 else likely
            every = [list(range(CONTEXT))] * lists
            candidates = taken(by, masses, every, choice.candidates, choice, blocks, shared, seen, nothing)
        elsewhere = masses.clone()
        for head in range(KV_HEADS):
            own = candidates[0 if shared else head]
            masses[head][:, own] = looked[head][:, own]
            elsewhere[head][:, own] = -math.inf
        elsewhere, total = elsewhere.logsumexp(-1), torch.logaddexp(masses.logsumexp(-1), seen)
        among = [[b * BLOCK + t for b in own for t in range(BLOCK)] for own in candidates]
        tokens = torch.full((*seen.shape, CONTEXT * BLOCK), -math.inf).double()
        for head in range(KV_HEADS):
            own = among[0 if shared else head]
            tokens[head][:, own] = exact[head].flatten(1)[:, own]
        by_share = choice._replace(reduce=LARGEST if choice.reduce in (LARGEST, LARGEST_SOFTMAX) else MEAN)
        by_share = by_share._replace(least=choice.least * BLOCK)
        shares = torch.exp(tokens - total[..., None])
        if shared and by_share.reduce == LARGEST:
            shares = shares.amax(0, keepdim=True).expand_as(shares)
        chosen = taken(shares, tokens, among, 1, by_share, choice.tokens, shared, seen, elsewhere)
        values, means = (
            torch.from_numpy(part[problem.table[row]]).double() for part in (problem.values, problem.value_means)
        )
        out, lse, attended = [], [], []
        for head in range(KV_HEADS):
            own, its = chosen[0 if shared else head], values[inside, head].flatten(0, 1)
            left = torch.ones(CONTEXT, BLOCK).bool()
            left.view(-1)[own] = False
            around = scores_of(problem, row, softcap)[0][head][:, AROUND].flatten(1)
            parts = [exact[head].flatten(1)[:, own], around]
            vectors = [its[own], values[AROUND, head].flatten(0, 1)]
            mass = torch.cat(parts, -1).logsumexp(-1)
            if estimates:
                parts.append(mean[head] + left.sum(1).double().log())
                vectors.append(means[inside, head, 0])
            out.append(torch.cat(parts, -1).softmax(-1) @ torch.cat(vectors))
            lse.append(torch.cat(parts, -1).logsumexp(-1))
            rest = masses[head].clone()
            looked_at = candidates[0 if shared else head]
            rest[:, looked_at] = exact[head].masked_fill(~left, -math.inf).logsumexp(-1)[:, looked_at]
            attended.append([mass, torch.logaddexp(mass, rest.logsumexp(-1))])
        yield candidates, torch.stack(out), torch.stack(lse), [torch.stack(e) for e in zip(*attended, strict=True)]


# Each has kernels of its own; tests/cpu_ops/test_token_attention.py has a soft cap of single tokens' scores.
@pytest.mark.parametrize("softcap", with_few([0.0, 3.0]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    reduce=st.sampled_from([SOFTMAX, LARGEST_SOFTMAX, MEAN, LARGEST]),
    rerank=st.sampled_from([2, 3, 0]),
    target=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    least=st.integers(0, 2),
    blocks=st.integers(1, CONTEXT),
    shared=st.booleans(),
    estimates=st.booleans(),
    beside=st.sampled_from([-math.inf, 0.0, 2.0]),
    size=st.sampled_from([0.3, 1.5]),
    representative_num=st.sampled_from([1, 2]),
    seed=st.integers(0, 10**6),
)
def test_chosen_tokens_and_the_rest_of_their_blocks_equal_the_references(
    softcap, reduce, rerank, target, least, blocks, shared, estimates, beside, size, representative_num, seed
):
    problem = Problem(seed, size, representative_num)
    choice = BlockChoice(reduce, rerank, target, least, tokens=blocks * BLOCK)
    step = problem.step(choice, estimates=estimates, softcap=softcap)
    most = min(CONTEXT, blocks * choice.candidates)
    problem.run(step, most=most, shared=shared, softcap=softcap, beside=beside)
    kept = {"shared": shared, "softcap": softcap, "estimates": estimates, "beside": beside}
    assert_same(problem, reference(problem, choice, **kept))


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_are_chosen_from_candidate_blocks(shared):
    problem = Problem(7)
    blocks = np.array([[[1, 4, -1], [0, 2, 5]], [[3, -1, -1], [-1, -1, -1]]], np.int32)
    blocks = np.ascontiguousarray(blocks[:, :1]) if shared else blocks
    choice = BlockChoice(rerank=0, tokens=BLOCK)
    step = problem.step(choice)
    problem.run(step, which=AS_GIVEN, positions=blocks, shared=shared)
    assert_same(problem, reference(problem, choice, shared=shared, allowed_blocks=blocks.tolist()))
    # This many tokens of each non-empty list, all from its candidate blocks.
    assert problem.taken.sum(axis=0).tolist()[:2] == [2 * BLOCK if shared else 3 * BLOCK, 3 if shared else 6]


# Two of fourteen equal tokens lie outside the lists; five of the other twelve make a share of one half.
@pytest.mark.parametrize(("target", "count"), [(0.0, 6), (0.49, 5), (0.99, 12)])
def test_of_equal_tokens_the_first_are_taken_as_few_as_reach_the_target(target, count):
    # One of four places holds no block.
    scores = np.zeros((1, 1, 2, 4 * BLOCK), np.float32)
    places, blocks = np.array([[[0, 1, -1, 2]]], np.int32), np.array([[[5, 3, -1, 4]]], np.int32)
    weights, masses = np.full((2, 1, 1, 2, 3), math.log(BLOCK), np.float32)
    beside, elsewhere = np.full((1, 1, 2), math.log(2), np.float32), np.full((1, 1, 2), -np.inf, np.float32)
    chosen, counts = np.empty((1, 1, 4 * BLOCK), np.int32), np.empty((1, 1, 3), np.int32)
    most = 6 if target == 0 else 12
    inputs = scores, places, blocks, weights, masses, np.array([3], np.int32), beside, elsewhere
    arguments = *inputs, False, SOFTMAX, target, 0, most, chosen, counts
    call_region("choose tokens", "", chosen_tokens.choosing_region(), arguments, threads=1)
    every = [block * BLOCK + t for block in (5, 3, 4) for t in range(BLOCK)]
    assert counts[0, 0].tolist() == [count, -(-count // BLOCK), count // BLOCK]
    assert chosen[0, 0, :count].tolist() == every[:count]


def test_with_room_for_every_token_nothing_is_estimated():
    problem, exact = Problem(5), Problem(5)
    step = problem.step(BlockChoice(rerank=0, tokens=CONTEXT * BLOCK))
    problem.run(step, most=CONTEXT)
    exact.run(exact.step(BlockChoice()), which=EVERYTHING)
    np.testing.assert_allclose(problem.out, exact.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(problem.masses, exact.masses, rtol=1e-6)
    blocks = ROWS * KV_HEADS * CONTEXT
    assert problem.taken.sum(axis=0).tolist() == [blocks * BLOCK, blocks, blocks, 0, 0, blocks, blocks]


def test_tokens_whose_keys_are_not_looked_at_cannot_be_chosen():
    with pytest.raises(ValueError, match="rerank must not be 1"):
        Problem(1).step(BlockChoice(tokens=BLOCK))
