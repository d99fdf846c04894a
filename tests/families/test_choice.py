"""Block selection equals plain references: scores, ties, head modes, votes, budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.chosen_blocks import best_blocks
from hetero_kv.cpu_ops.step_contract import NOTHING_FORBIDDEN
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.budgets import Pyramid, layer_budget
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.preselection import block_votes, preselect
from hetero_kv.families.retrieval.state import RetrievalState


def best(scores, count):
    """Positions of the `count` highest, ties to the earlier, ascending."""
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 2),
    blocks=st.integers(1, 12),
    share=st.floats(0, 1),
    shared=st.booleans(),
    group_reduce=st.sampled_from(["mean", "max"]),
    ties=st.booleans(),
    seed=st.integers(0, 999),
)
def test_selected_blocks_are_the_references(rows, blocks, share, shared, group_reduce, ties, seed):
    rng = np.random.default_rng(seed)
    shape = (rows, 3, 4, blocks)
    scores = (rng.integers(0, 3, shape) if ties else rng.standard_normal(shape)).astype(np.float32)
    count = max(1, int(share * blocks))
    chosen = best_blocks(scores, count, NOTHING_FORBIDDEN, shared, group_reduce == "max")
    for row in range(rows):
        per_head = scores[row].mean(axis=1) if group_reduce == "mean" else scores[row].max(axis=1)
        lists = [per_head.sum(axis=0)] if shared else list(per_head)
        assert [positions.tolist() for positions in chosen[row]] == [best(head, count) for head in lists]


def test_of_candidates_the_positions_are_selected_that_their_scores_are_of():
    scores = np.array([[8, 6, 5], [9, 5, 7]], dtype=np.float32).reshape(1, 2, 1, 3)
    candidates = np.array([[[1, 3, 4], [0, 2, 4]]], dtype=np.int32)
    assert best_blocks(scores, 2, candidates, False, False).tolist() == [[[1, 3], [0, 4]]]


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 70),
    window=st.integers(1, 30),
    softcap=st.sampled_from([None, 2.0]),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_received_attention_is_the_column_sum_of_the_last_rows(length, window, softcap, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 4, length, 8, generator=generator)
    k = torch.randn(1, 2, length, 8, generator=generator)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    expected = scores.softmax(-1)[:, :, -window:].sum(dim=2).unflatten(1, (2, 2)).sum(dim=2)
    observation = Observation(window)
    for queries, lse in zip(q.split(chunk, 2), scores.logsumexp(-1).split(chunk, 2), strict=True):
        observation = observation.grown(queries, lse, 0.5, softcap)
    torch.testing.assert_close(observation.accumulated_attention(k), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_preselection_is_snapkvs_pooled_vote_over_blocks(kernel_size, shared):
    received = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(kernel_size))
    first, end, size = 2, 11, 4
    chosen = preselect(block_votes(received, first, end, size, kernel_size), 4, shared)
    for row in range(2):
        votes = []
        for head in range(3):
            context = np.pad(received[row, head, first * size : end * size].numpy(), kernel_size // 2)
            pooled = np.array([context[i : i + kernel_size].mean() for i in range((end - first) * size)])
            votes.append(pooled.reshape(end - first, size).mean(axis=1))
        lists = [np.mean(votes, axis=0)] if shared else votes
        assert [positions.tolist() for positions in chosen[row]] == [best(vote, 4) for vote in lists]


def test_blocks_that_enter_the_context_after_preselection_are_candidates_too():
    state = RetrievalState(candidates=np.array([[[1, 4]]], dtype=np.int32), preselected_end=6)
    assert state.allowed(8).tolist() == [[[1, 4, 6, 7]]]
    assert RetrievalState().allowed(8) is None


def test_a_budget_is_a_number_a_list_or_a_pyramid():
    assert layer_budget("top_k_blocks", 7, 2, 4) == 7
    assert layer_budget("top_k_blocks", "all", 2, 4) is None
    assert [layer_budget("top_k_blocks", (9, 8, 7, 6), i, 4) for i in range(4)] == [9, 8, 7, 6]
    assert [layer_budget("top_k_blocks", Pyramid(4, 10), i, 4) for i in range(4)] == [10, 8, 6, 4]


def test_a_list_of_the_wrong_length_is_an_error():
    with pytest.raises(HeteroKVError, match="top_k_blocks lists 3 numbers, but the model has 4 layers"):
        layer_budget("top_k_blocks", (1, 2, 3), 0, 4)


@pytest.mark.parametrize("text", ["pyramid(9, 4)", "pyramid(1)", "pyramid(-1, 4)", "tower(1, 2)"])
def test_budgets_that_are_no_pyramid_are_refused(text):
    assert Pyramid.parse(text) is None
