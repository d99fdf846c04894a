"""An estimating step equals a short reference in torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.chosen_blocks import LARGEST, LARGEST_SOFTMAX, MEAN, SOFTMAX
from hetero_kv.cpu_ops.retrieval_step import BlockChoice, RetrievalStep, StepEstimates, StepPool
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, CHOSEN, EVERYTHING, NOTHING_FORBIDDEN
from tests.cpu_ops.estimating_problems import (
    BLOCK,
    BLOCKS,
    CONTEXT,
    DIM,
    END,
    FIRST,
    GROUP,
    KV_HEADS,
    POOL,
    POSITION,
    ROWS,
    SCALE,
    Problem,
    assert_same,
    reference,
    scores_of,
)

choices = st.builds(
    BlockChoice,
    reduce=st.sampled_from([SOFTMAX, LARGEST_SOFTMAX, MEAN, LARGEST]),
    rerank=st.sampled_from([1, 1, 2, 0]),
    target=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    least=st.integers(0, 3),
    group_blocks=st.sampled_from([1, 2, 3]),
    group_factor=st.integers(1, 3),
    tokens=st.just(0),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choice=choices,
    most=st.integers(1, CONTEXT),
    shared=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]),
    estimates=st.booleans(),
    among=st.sampled_from([None, [0, 2, 3, 5, 6, 8]]),
    beside=st.sampled_from([-math.inf, 0.0, 2.0]),
    size=st.sampled_from([0.3, 1.5]),
    representative_num=st.sampled_from([1, 2]),
    seed=st.integers(0, 10**6),
)
def test_choices_attention_and_estimates_equal_the_references(
    choice, most, shared, softcap, estimates, among, beside, size, representative_num, seed
):
    problem = Problem(seed, size, representative_num)
    if among is not None:
        most = min(most, len(among))
    lists = 1 if shared else KV_HEADS
    allowed = NOTHING_FORBIDDEN if among is None else np.full((ROWS, lists, len(among)), among, np.int32)
    step = problem.step(choice, estimates=estimates, softcap=softcap)
    problem.run(step, most=most, shared=shared, softcap=softcap, allowed=allowed, beside=beside)
    kept = {"shared": shared, "softcap": softcap, "estimates": estimates, "beside": beside, "allowed": among}
    assert_same(problem, reference(problem, choice, most, **kept))


@settings(max_examples=20, deadline=None)
@given(choice=choices, most=st.integers(1, CONTEXT), shared=st.booleans(), seed=st.integers(0, 10**6))
def test_with_all_groups_opened_a_step_is_the_one_without_groups(choice, most, shared, seed):
    found = []
    for size in (max(choice.group_blocks, 2), 1):
        problem = Problem(seed)
        step = problem.step(choice._replace(group_blocks=size, group_factor=CONTEXT))
        problem.run(step, most=most, shared=shared)
        found.append([problem.positions, problem.out, problem.lse, problem.masses, problem.taken])
    for grouped, alone in zip(*found, strict=True):
        np.testing.assert_array_equal(grouped, alone)


def test_groups_of_candidate_blocks_are_opened():
    problem = Problem(11)
    candidates = np.array([[[1, 4, -1], [0, 8, -1]], [[7, -1, -1], [-1, -1, -1]]], np.int32)
    step = problem.step(BlockChoice(group_blocks=2))
    problem.run(step, which=AS_GIVEN, positions=candidates)
    # The last block of the nine is in no group, and always scored.
    opened = [[0, 2], [0], [3], []]
    whole = sum(map(len, opened))
    assert problem.taken.sum(axis=0).tolist() == [5, 0, 4 + 2 * whole, 4 * 4, whole, 5, 5]
    for row in range(ROWS):
        exact, mean, _ = scores_of(problem, row, 0.0)
        for head in range(KV_HEADS):
            own = [p for p in candidates[row, head] if p >= 0]
            scored = [b for b in range(CONTEXT) if b == 8 or b // 2 in opened[row * KV_HEADS + head]]
            rest = [FIRST + b for b in scored if b not in own]
            _, (keys, values) = problem.grouped(row, 2)
            left = [group for group in range(4) if group not in opened[row * KV_HEADS + head]]
            q = torch.from_numpy(problem.q).view(ROWS, KV_HEADS, GROUP, DIM)[row, head]
            of_groups = q.double() @ keys[left, head].mean(1).double().T * SCALE + math.log(2 * BLOCK)
            blocks = [0, *(FIRST + p for p in own), 10, 11]
            parts = exact[head][:, blocks].flatten(1), mean[head][:, rest] + math.log(BLOCK), of_groups
            all_values, means = (
                torch.from_numpy(part[problem.table[row]]) for part in (problem.values, problem.value_means)
            )
            vectors = all_values[blocks, head].flatten(0, 1), means[rest, head, 0], values[left, head].mean(1)
            expected = torch.cat(parts, -1).softmax(-1) @ torch.cat(vectors).double()
            out = problem.out[row].reshape(KV_HEADS, GROUP, DIM)[head]
            np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rest", ["estimated", "dropped"])
def test_a_step_reports_the_mass_that_it_estimates_for_everything(rest):
    problem = Problem(3)
    problem.run(problem.step(BlockChoice(), estimates=rest == "estimated"))
    whole = Problem(3)
    whole.run(whole.step(BlockChoice()))
    np.testing.assert_allclose(problem.masses, whole.masses, rtol=1e-6)
    assert (problem.masses[0] < problem.masses[1]).all()
    assert (problem.lse == problem.masses[0]).all() == (rest == "dropped")


def test_with_every_block_attended_to_nothing_is_estimated():
    problem, exact = Problem(5), Problem(5)
    problem.run(problem.step(BlockChoice()), most=CONTEXT)
    exact.run(exact.step(BlockChoice()), which=EVERYTHING)
    np.testing.assert_allclose(problem.out, exact.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(problem.masses, exact.masses, rtol=1e-6)


def test_candidate_blocks_may_be_few_or_none():
    problem = Problem(7)
    candidates = np.array([[[1, 4, -1], [0, 2, 5]], [[3, -1, -1], [-1, -1, -1]]], np.int32)
    problem.run(problem.step(BlockChoice(), estimates=False), which=AS_GIVEN, positions=candidates)
    exact = [scores_of(problem, row, 0.0)[0] for row in range(ROWS)]
    for row in range(ROWS):
        for head in range(KV_HEADS):
            blocks = [0, *(1 + p for p in candidates[row, head] if p >= 0), 10, 11]
            expected = exact[row][head][:, blocks].flatten(1).logsumexp(-1)
            np.testing.assert_allclose(problem.masses[0, row, head], expected, rtol=1e-5)


def test_rows_of_several_lengths_attend_to_all_their_blocks():
    together, whole = Problem(3), Problem(3)
    whole.run(whole.step(BlockChoice()), which=EVERYTHING)
    # The second row is as it was, and the first has fewer blocks, and all its tokens already.
    together.table[0, BLOCKS - 2 :] = -1
    ranges, step = np.array([[-1, POSITION], [FIRST, FIRST], [4, END]]), together.step(BlockChoice())
    inputs = together.q, together.k, together.v, ranges, together.table
    others = NOTHING_FORBIDDEN, False, SCALE, 0.0, together.out, together.lse, StepEstimates.of(together.lse)
    step(*inputs, EVERYTHING, NOTHING_FORBIDDEN, *others)
    np.testing.assert_allclose(together.out[1], whole.out[1], rtol=1e-5, atol=1e-6)
    expected = scores_of(together, 0, 0.0)[0][:, :, : BLOCKS - 2].flatten(2).logsumexp(-1)
    np.testing.assert_allclose(together.lse[0], expected, rtol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choice=choices,
    tokens=st.sampled_from([0, 0, BLOCK, 3 * BLOCK]),
    fewer=st.integers(0, CONTEXT),
    most=st.integers(1, CONTEXT),
    shared=st.booleans(),
    estimates=st.booleans(),
    beside=st.sampled_from([-math.inf, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_rows_of_several_lengths_are_what_each_is_alone_bit_by_bit(
    choice, tokens, fewer, most, shared, estimates, beside, seed
):
    """Of one thread: several divide the work of rows, whose parts they merge, in another way for each."""
    problem, lists = Problem(seed), 1 if shared else KV_HEADS
    choice = choice._replace(tokens=tokens if choice.rerank != 1 else 0)
    if choice.tokens:
        most = tokens // BLOCK * choice.candidates
    step = problem.step(choice, estimates=estimates, threads=1)
    ranges = np.array([[-1, POSITION], [FIRST, FIRST], [END - fewer, END]])
    problem.table[0, BLOCKS - fewer :] = -1

    def run(rows, blocks, context):
        out, lse = problem.out[rows].copy(), problem.lse[rows].copy()
        positions = np.empty((len(out), lists, min(most, context)), np.int32)
        found = StepEstimates.of(lse, np.full_like(lse, beside))
        inputs = [part[rows] for part in (problem.q, problem.k, problem.v)]
        table = problem.table[rows, :blocks].copy()
        others = NOTHING_FORBIDDEN, shared, SCALE, 0.0, out, lse, found
        step(*inputs, ranges[:, rows].copy(), table, CHOSEN, positions, *others)
        return positions, out, lse, found

    together = run(slice(0, ROWS), BLOCKS, CONTEXT)
    for row, less in enumerate((fewer, 0)):
        alone = run(slice(row, row + 1), BLOCKS - less, CONTEXT - less)
        width = alone[0].shape[2]
        assert (together[0][row, :, width:] == -1).all()
        np.testing.assert_array_equal(together[0][row, :, :width], alone[0][0])
        for both, own in zip(together[1:3], alone[1:3], strict=True):
            np.testing.assert_array_equal(both[row], own[0])
        np.testing.assert_array_equal(together[3].masses[:, row], alone[3].masses[:, 0])
        np.testing.assert_array_equal(together[3].taken[row], alone[3].taken[0])


def test_estimates_need_means():
    problem = Problem(1)
    pool = StepPool(problem.keys, problem.values, problem.representatives, problem.lengths)
    for choice in (BlockChoice(rerank=2), BlockChoice(target=0.5), BlockChoice(tokens=BLOCK)):
        with pytest.raises(ValueError, match="has_mean must be set"):
            RetrievalStep(pool, GROUP, "quest", False, np.float32, 2, choice)


def test_blocks_outside_the_pool_and_other_shapes_are_refused():
    problem = Problem(1)
    step = problem.step(BlockChoice())
    problem.table = problem.table + POOL
    with pytest.raises(IndexError, match="blocks of table, and those in the pool"):
        problem.run(step)
    problem = Problem(1)
    step = problem.step(BlockChoice())
    problem.masses = problem.masses[:1]
    with pytest.raises(ValueError, match="that it was bound to"):
        problem.run(step)
