"""Parts of prompts are as large as the time that others wait allows, and of a size that the kernels are made for."""

from __future__ import annotations

import math
import random

import pytest

from hetero_kv.serving.part_size import LARGE, LEAST, LEAST_BESIDE, SMALL, SMALL_BY_TILES, PartSize


def measured(token_s, step_s=0.0):
    """Parts for gaps of 0.25 s, behind many measurements."""
    size = PartSize(0.25, 2048)
    for _ in range(50):
        size.passed(64, 64 * token_s)
        size.decoded(step_s)
    return size


def test_a_prompt_that_nobody_waits_for_passes_in_long_parts():
    size = measured(0.01)
    assert [size.of(remaining, rows=0) for remaining in (5000, 2048, 7)] == [2048, 2048, 7]


@pytest.mark.parametrize(
    ("token_s", "step_s", "expected"),
    [
        (0.25 / 3000, 0.0, 2048),
        (0.25 / 1000, 0.0, 1000),
        (0.25 / (LARGE - 50), 0.0, SMALL),
        (0.25 / 100, 0.0, SMALL),
        (0.25 / 100, 0.1, LEAST),
        (0.25 / 5, 0.0, LEAST),
        (0.001, 0.5, LEAST),
    ],
)
def test_a_part_fits_into_the_gap(token_s, step_s, expected):
    size = measured(token_s, step_s).of(5000, rows=2)
    assert size == pytest.approx(expected, abs=2)


def test_without_a_target_a_part_is_as_large_as_where_nobody_waits():
    size = PartSize(math.inf, 2048)
    size.passed(64, 1.0)
    assert size.of(5000, rows=2) == size.of(5000, rows=2, beside=True) == 2048


def test_the_first_part_is_small_because_nothing_is_known():
    assert PartSize(0.25, 2048).of(5000, rows=1) == LEAST
    assert measured(0.01).of(3, rows=1) == 3


@pytest.mark.parametrize(
    ("token_s", "expected"), [(0.25 / 3000, 2048), (0.25 / 100, SMALL), (0.01, 18), (0.25 / 5, LEAST_BESIDE)]
)
def test_a_part_beside_decoded_tokens_leaves_them_their_share_of_the_gap(token_s, expected):
    assert measured(token_s).of(5000, rows=2, beside=True) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("token_s", "expected"), [(0.25 / 300, 238), (0.25 / 3000, 2048), (0.01, 18)])
def test_small_parts_are_larger_where_they_cost_no_more_for_each_token(token_s, expected):
    found = measured(token_s).of(5000, rows=2, beside=True, small=SMALL_BY_TILES)
    assert found == pytest.approx(expected, abs=1)


def test_a_part_in_a_forward_of_its_own_is_no_larger_where_those_beside_may_be():
    assert measured(0.25 / 300).of(5000, rows=2, small=SMALL_BY_TILES) == SMALL


def test_a_forwards_own_time_does_not_count_as_its_tokens():
    size = measured(0.01)
    for tokens in (10, 14, 60, 10, 14, 60):
        size.passed(tokens, 0.08 + 0.002 * tokens, beside=True)
    # 0.2 s = 0.08 s and 60 tokens.
    assert size.of(5000, rows=10, beside=True) == pytest.approx(50, abs=1)


@pytest.mark.parametrize("noise", [[(40, 0.1), (10, 0.3)], [(12, 0.1), (13, 0.4)]])
def test_times_that_tell_no_line_count_for_each_token(noise):
    size = measured(0.01)
    for tokens, seconds in noise * 20:
        size.passed(tokens, seconds, beside=True)
    mean = sum(seconds for _, seconds in noise) / sum(tokens for tokens, _ in noise)
    fitting = 0.25 / size._beside.longest / mean - 2
    assert size.of(5000, rows=2, beside=True) == pytest.approx(max(LEAST_BESIDE, fitting), abs=2)


@pytest.mark.parametrize("noise", [0.01, 0.08, 0.2])
def test_one_forward_in_a_hundred_takes_longer_than_the_target(noise):
    drawn, size = random.Random(1), measured(0.01)
    found = []
    for _ in range(6000):
        tokens = size.of(5000, rows=2, beside=True) + 2
        seconds = (0.05 + 0.003 * tokens) * drawn.lognormvariate(0, noise)
        size.passed(tokens, seconds, beside=True)
        found.append((tokens, seconds))
    later = found[1000:]
    # With little noise the largest small part fits.
    seldom = 0.0 if noise < 0.05 else 0.01
    assert sum(seconds > 0.25 for _, seconds in later) / len(later) == pytest.approx(seldom, abs=0.009)
    # 0.25 s less the noise, and no room wasted.
    longest = (0.25 / math.exp(2.33 * noise) - 0.05) / 0.003
    assert sum(tokens for tokens, _ in later) / len(later) == pytest.approx(min(longest, SMALL + 2), rel=0.2)
