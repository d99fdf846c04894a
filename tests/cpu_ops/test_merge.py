"""Merging partial attention is exact."""

import numpy as np
import pytest

from hetero_kv.cpu_ops.merge import merge_partials


def test_a_part_without_keys_changes_nothing():
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((2, 3, 8), np.float32), rng.standard_normal((2, 3), np.float32)
    merged, total = merge_partials(np.stack([np.zeros_like(out), out]), np.stack([np.full_like(lse, -np.inf), lse]))
    np.testing.assert_allclose(merged, out, rtol=1e-6)
    np.testing.assert_allclose(total, lse, rtol=1e-6)


def test_no_keys_at_all_give_zero_and_minus_infinity():
    merged, total = merge_partials(np.zeros((2, 1, 4), np.float32), np.full((2, 1), -np.inf, np.float32))
    assert (merged == 0).all()
    assert np.isneginf(total).all()
    assert merged.dtype == total.dtype == np.float32


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_parts_are_weighted_by_their_share_at_any_level(level):
    outs = np.array([[[1.0]], [[4.0]]], np.float32)
    lses = np.array([[level], [level]], np.float32)
    merged, total = merge_partials(outs, lses)
    np.testing.assert_allclose(merged, [[2.5]])
    np.testing.assert_allclose(total, [level + np.log(2)])


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"outs \(2, 3, 8\)"):
        merge_partials(np.zeros((2, 3, 8), np.float32), np.zeros((2, 4), np.float32))
