"""Block scores equal their definitions and keep their bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.scores import block_scores
from hetero_kv.cpu_ops.storage import BFLOAT16, Q4_0, Q8_0
from tests.support.slow_variants import with_few
from tests.support.storage_formats import decoded, encoded

SHAPES = [
    ("dot", 1, 4, 64, np.float16),
    ("dot", 3, 7, 20, np.float32),
    ("quest", 2, 4, 64, np.float16),
    ("quest", 2, 3, 20, np.float32),
    ("dot", 3, 4, 64, BFLOAT16),
    ("quest", 2, 4, 64, Q8_0),
    ("dot", 1, 7, 96, Q4_0),
]


def reference(q, representatives, block_ids, block_counts, mode):
    """[rows, kv_heads, group, max_blocks] float64, straight from the definitions."""
    listed = decoded(representatives)[block_ids]
    products = np.einsum("rhgd,rbhnd->rhgbnd", q.astype(np.float64), listed)
    scores = products.sum(-1).max(-1) if mode == "dot" else products.max(-2).sum(-1)
    scores[np.broadcast_to(np.arange(block_ids.shape[1]) >= block_counts[:, None, None, None], scores.shape)] = -np.inf
    return scores


@pytest.mark.parametrize(
    ("mode", "number", "group", "dim", "dtype"), with_few(SHAPES, [SHAPES[place] for place in (0, 3, 4, 6)])
)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 3), kv_heads=st.integers(1, 3), max_blocks=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_block_scores_equal_their_definition(mode, number, group, dim, dtype, rows, kv_heads, max_blocks, seed):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, kv_heads, group, dim), np.float32)
    representatives = encoded(rng.standard_normal((25, kv_heads, number, dim), np.float32), dtype)
    ids = rng.integers(0, 25, (rows, max_blocks)).astype(np.int32)
    counts = rng.integers(0, max_blocks + 1, rows).astype(np.int32)
    scores = block_scores(q, representatives, ids, counts, mode)
    np.testing.assert_allclose(scores, reference(q, representatives, ids, counts, mode), rtol=3e-6, atol=3e-5)


@pytest.mark.parametrize("isa", with_few(available()))
@pytest.mark.parametrize(("mode", "number", "group", "dim", "dtype"), [SHAPES[3], SHAPES[6]])
def test_every_vector_width_scores_alike(isa, mode, number, group, dim, dtype):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 2, group, dim), np.float32)
    representatives = encoded(rng.standard_normal((25, 2, number, dim), np.float32), dtype)
    ids, counts = rng.integers(0, 25, (2, 9)).astype(np.int32), np.array([9, 4], np.int32)
    with forced_isa(isa):
        scores = block_scores(q, representatives, ids, counts, mode)
    np.testing.assert_allclose(scores, reference(q, representatives, ids, counts, mode), rtol=3e-6, atol=3e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.floats(0.01, 100))
def test_quest_score_bounds_every_key_in_its_block(seed, spread):
    rng = np.random.default_rng(seed)
    keys = (rng.standard_normal((10, 2, 16, 64)) * spread).astype(np.float16)
    q = rng.standard_normal((1, 2, 4, 64), np.float32)
    representatives = np.stack([keys.max(axis=2), keys.min(axis=2)], axis=2)
    ids, counts = np.arange(10, dtype=np.int32)[None], np.array([10], np.int32)
    scores = block_scores(q, representatives, ids, counts, "quest")
    best = np.einsum("rhgd,bhtd->rhgbt", q, keys.astype(np.float32)).max(-1)
    assert (scores >= best - 1e-4 * spread).all()


def test_scores_do_not_depend_on_the_number_of_threads():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 64), np.float32)
    representatives = rng.standard_normal((25, 3, 1, 64)).astype(np.float16)
    ids, counts = rng.integers(0, 25, (2, 17)).astype(np.int32), np.array([17, 5], np.int32)
    one = block_scores(q, representatives, ids, counts, "dot", threads=1)
    np.testing.assert_array_equal(block_scores(q, representatives, ids, counts, "dot"), one)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "mean"}, ValueError, "'mean' is not one of dot, quest"),
        ({"mode": "quest"}, ValueError, "needs 2 representatives"),
        ({"representatives": np.zeros((5, 1, 1, 64), np.float32)}, ValueError, "kv_heads"),
        ({"block_counts": np.array([9], np.int32)}, IndexError, "block_counts in 0..3"),
        ({"block_ids": np.array([[0, 1, 5]], np.int32)}, IndexError, "block_ids must lie in 0..4"),
        ({"block_ids": np.array([[0, 1, 2]])}, TypeError, "block_ids int64"),
        ({"block_counts": np.array([[3]], np.int32)}, ValueError, "block_counts"),
        ({"out": np.zeros((1, 2, 4, 4), np.float32)}, ValueError, "out"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, error, message):
    arguments = {
        "q": np.zeros((1, 2, 4, 64), np.float32),
        "representatives": np.zeros((5, 2, 1, 64), np.float16),
        "block_ids": np.array([[0, 1, 2]], np.int32),
        "block_counts": np.array([3], np.int32),
        "mode": "dot",
    }
    with pytest.raises(error, match=message):
        block_scores(**(arguments | change))
