"""Filters leave the tokens that sorting leaves, and a draw takes the token at which the cumulated weights pass it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.token_sampling import drawn, filtered_weights

VOCAB = 700


def some_logits(seed, levels):
    """Logits of few or many different values, a few of them -inf."""
    drawn_by = np.random.default_rng(seed)
    logits = drawn_by.standard_normal(VOCAB) * 4 if levels == 0 else drawn_by.integers(0, levels, VOCAB) * 1.5
    logits = logits.astype(np.float32)
    logits[drawn_by.integers(0, VOCAB, 5)] = -np.inf
    return logits


def sorted_out(logits, temperature, top_k, top_p, min_p):
    """The weights that are left, by sorting; of equal ones the first."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= top_p * weights.sum()]] = 0
    weights[weights < min_p * (1 - 1e-6)] = 0
    return weights


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000), levels=st.sampled_from([0, 1, 3, 40]), temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 64, VOCAB - 1, VOCAB + 1]), top_p=st.sampled_from([1.0, 0.9371, 0.31, 0.001]),
    min_p=st.sampled_from([0.0, 0.0517, 1.0]),
)  # fmt: skip
def test_filters_leave_what_sorting_leaves(seed, levels, temperature, top_k, top_p, min_p):
    logits = some_logits(seed, levels)
    found = filtered_weights(logits, temperature, top_k, top_p, min_p)
    expected = sorted_out(logits, temperature, top_k, top_p, min_p)
    # An exponent of up to 128 is rounded by float32 to multiples of 2^-17, twice.
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-30)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2000), seed=st.integers(0, 10_000), number=st.floats(0, 1, exclude_max=True))
def test_a_draw_takes_the_token_at_which_the_sum_passes_it(size, seed, number):
    random = np.random.default_rng(seed)
    weights = random.random(size).astype(np.float32) * (random.random(size) < 0.5)
    weights[random.integers(size)] = 1
    sums = np.cumsum(weights, dtype=np.float64)
    token = drawn(weights, number)
    assert weights[token] > 0
    assert sums[token] - weights[token] <= number * sums[-1] * (1 + 1e-9)
    assert sums[token] >= number * sums[-1] * (1 - 1e-9)


def test_the_last_token_with_a_weight_is_drawn_by_the_largest_number():
    weights = np.zeros(1500, np.float32)
    weights[[3, 700]] = 1, 1e-3
    assert drawn(weights, np.nextafter(1.0, 0.0)) == 700
    assert drawn(weights, 0.0) == 3


def test_any_temperature_draws_a_token_that_is_allowed():
    logits = np.array([-np.inf, 2.0, 5.0, -np.inf, 4.0], np.float32)
    for temperature in (5e-324, 1e-40, 1e-3, 1e3, 1e50, 1e308):
        weights = filtered_weights(logits, temperature, 0, 1.0, 0.0)
        assert np.isfinite(weights).all()
        assert (weights[[0, 3]] == 0).all()
        assert weights[2] == 1
        expected = [0, 1, 0] if temperature < 1e-2 else [1, 1, 1]
        np.testing.assert_allclose(weights[[1, 2, 4]], expected, atol=5e-3)
