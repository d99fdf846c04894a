"""Vertical and slash scores equal plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import qk_tile
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.vertical_slash_scores import distances_within, vertical_slash_scores
from hetero_kv.gpu_ops.chosen_keys import attention_by_line
from tests.support.slow_variants import with_slow

SCALE = 0.3


def problem(queries, past, n, dim, dtype=torch.float32, heads=3):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, queries, dim, generator=generator).to(dtype)
    past_k, k = (torch.randn(count, dim, generator=generator).to(dtype) for count in (past, n))
    return q, past_k, k


def lines_by_softmax(q, past_k, k, softcap):
    """By token and by distance: the sums over one head's last queries of the softmax of their scores."""
    tokens = len(past_k) + len(k)
    scores = q.double() @ torch.cat([past_k, k]).T.double() * SCALE
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    away = torch.arange(tokens - len(q), tokens)[:, None] - torch.arange(tokens)[None]
    weights = scores.masked_fill(away < 0, float("-inf")).softmax(1)
    by_distance = torch.zeros(tokens).double().index_add_(0, away.clamp(min=0).flatten(), weights.flatten())
    return weights.sum(0).float(), by_distance.float()


def are_those_of_the_softmax(q, past_k, k, softcap):
    by_token, by_distance = attention_by_line(q, past_k, k, SCALE, softcap)
    assert by_token.shape == by_distance.shape == (len(q), len(past_k) + len(k))
    for head in range(len(q)):
        tokens, distances = lines_by_softmax(q[head], past_k, k, softcap)
        torch.testing.assert_close(torch.from_numpy(by_token[head]), tokens, atol=1e-6, rtol=5e-5)
        torch.testing.assert_close(torch.from_numpy(by_distance[head]), distances, atol=1e-6, rtol=5e-5)


# Within a span of tokens and over several, in blocks that are whole and that are not.
@pytest.mark.parametrize(
    ("queries", "past", "n"),
    [(5, 40, 9), (64, 0, 64), (64, 2050, 130), (1, 1024, 1), (7, 960, 128), (33, 1023, 1025), (64, 994, 64)],
)
@pytest.mark.parametrize(
    ("dtype", "dim", "softcap"),
    with_slow(
        [
            (torch.float32, 16, None), (torch.float32, 16, 2.0), (torch.float32, 20, None), (torch.float16, 16, None),
            (torch.bfloat16, 16, 2.0), (torch.bfloat16, 64, None), (torch.bfloat16, 64, 2.0),
        ],
        # Models of other tests have the first ones' kernel too.
        slow=[
            (torch.float32, 16, 2.0), (torch.float32, 20, None), (torch.bfloat16, 16, 2.0), (torch.bfloat16, 64, None),
            (torch.bfloat16, 64, 2.0),
        ],
    ),
)  # fmt: skip
def test_attention_by_line_is_that_of_the_softmax(queries, past, n, dtype, dim, softcap):
    are_those_of_the_softmax(*problem(queries, past, n, dim, dtype), softcap)


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_by_line_is_the_same_where_the_cpu_has_no_tiles(softcap, monkeypatch):
    monkeypatch.setattr(qk_tile, "multiplies_by_tiles", lambda: False)
    are_those_of_the_softmax(*problem(64, 333, 150, 64, torch.bfloat16), softcap)


def test_one_token_may_have_all_attention():
    q, past_k, k = problem(64, 1500, 200, 16)
    past_k[700] = 30 * q[1].mean(0)
    q[1] += 30 * q[1].mean(0)
    are_those_of_the_softmax(q, past_k, k, None)


def test_queries_that_see_nothing_of_a_span_add_nothing_at_large_scales():
    q, past_k, k = problem(64, 994, 64, 16)
    for sums in vertical_slash_scores(q.numpy(), past_k.numpy(), k.numpy(), 4.0):
        assert np.allclose(sums.sum(1), 64, rtol=1e-4)


def test_any_number_of_threads_finds_the_same():
    inputs = [each.numpy() for each in problem(64, 3000, 150, 16)]
    one, two = (vertical_slash_scores(*inputs, SCALE, threads=threads) for threads in (1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_line_sums_of_one_query_on_one_token():
    by_token, by_distance = vertical_slash_scores(
        np.ones((1, 1, 16), np.float32), np.ones((0, 16), np.float32), np.ones((1, 16), np.float32), 1.0
    )
    assert np.allclose(by_token, 1, atol=1e-5)
    assert np.allclose(by_distance, 1, atol=1e-5)


def test_arrays_of_wrong_shapes_are_refused():
    q, past, k = np.ones((2, 4, 16), np.float32), np.ones((9, 16), np.float32), np.ones((70, 16), np.float32)
    vertical_slash_scores(q, past, k, 1.0)
    for arrays in (
        (q, past[:, :8], k),
        (q, past, k[:, :8]),
        (q[:0], past, k),
        (q, past, k[:3]),
        (np.ones((2, 65, 16), np.float32), past, k),
        [np.zeros((*each.shape[:-1], 24), np.uint16) for each in (q, past, k)],
    ):
        with pytest.raises(ValueError, match=r"fit|are not the last ones|must be a multiple"):
            vertical_slash_scores(*arrays, 1.0)
    with pytest.raises(ValueError, match="scale is 0"):
        vertical_slash_scores(q, past, k, 0.0)
    for arrays in ((q, past, k.astype(np.float64)), [each.astype(np.float64) for each in (q, past, k)]):
        with pytest.raises(TypeError, match="must be float32, or bits"):
            vertical_slash_scores(*arrays, 1.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), budget=st.integers(0, 400))
def test_distances_are_taken_while_a_block_sees_no_more_than_the_budget(seed, budget):
    ranked = np.random.default_rng(seed).permutation(500)[:40]
    taken = distances_within(ranked, QUERY_BLOCK, 64, budget)
    far = [distance for distance in ranked if distance >= 64]
    assert taken.tolist() == far[: len(taken)]

    def cost(distances):
        near = set(range(64 + QUERY_BLOCK - 1))
        return len({at for away in distances for at in range(away, away + QUERY_BLOCK)} - near)

    assert cost(taken) <= budget
    assert len(taken) == len(far) or cost(far[: len(taken) + 1]) > budget
