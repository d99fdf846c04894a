"""Draws a token from a row of logits: temperature, the filters top-k, top-p and min-p, and one random number."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2

_REASSOCIATED = {"contract", "nsz", "reassoc"}
# Tokens whose weights are summed before one of them is drawn.
_PART = 512


def filtered_weights(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Returns the tokens' unnormalised probabilities [vocab] float32, the likeliest token's 1, removed tokens' 0.

    logits: [vocab] float32 with a finite largest number; -inf forbids a token. temperature: above 0. The filters follow
    each other as in transformers: the top_k likeliest tokens (0: all); of these the likeliest until top_p of their
    probability is reached; tokens with at least min_p of the likeliest one's probability. Of equally likely tokens
    those with lower ids stay.
    """
    weights = np.empty(len(logits), np.float32)
    filter_kernel()(np.ascontiguousarray(logits), temperature, top_k, top_p, min_p, weights)
    return weights


def drawn(weights: np.ndarray, number: float) -> int:
    """Returns the token that a random number from [0, 1) draws by weights [vocab] float32, some of them above 0."""
    return int(draw_kernel()(weights, number))


@device_function(fastmath=_REASSOCIATED)
def _sum(weights, first, end):
    total = np.float64(0)
    for i in range(first, end):
        total += weights[i]
    return total


@device_function
def _boundary(bits, weights, low, width, limit, before, by_sum):
    """Returns the digit at which counting (or summing) down from the largest weights reaches the limit, and what is
    counted before it."""
    found = np.zeros(1 << width, np.float64)
    mask = np.uint32((1 << width) - 1)
    for i in range(bits.size):
        if bits[i]:
            found[(bits[i] >> np.uint32(low)) & mask] += weights[i] if by_sum else 1.0
    digit = (1 << width) - 1
    while digit > 0 and before + found[digit] < limit:
        before += found[digit]
        digit -= 1
    return np.uint32(digit), before


@device_function
def _cut(weights, limit, by_sum):
    """Remove all but the largest weights, in place: the first `limit` of them, or those until their sum is `limit`.

    The bits of a float32 from 0 to 1 are ordered as the numbers; three digits of them are compared in turn.
    """
    bits = weights.view(np.uint32)
    prefix, before = _boundary(bits, weights, 20, 11, limit, np.float64(0), by_sum)
    places = np.empty(bits.size, np.int64)
    count = 0
    for i in range(bits.size):
        digit = bits[i] >> np.uint32(20)
        if digit < prefix:
            weights[i] = 0
        elif digit == prefix:
            places[count] = i
            count += 1
    for low in (10, 0):
        at_boundary = weights[places[:count]]
        digits = at_boundary.view(np.uint32)
        at, before = _boundary(digits, at_boundary, low, 10, limit, before, by_sum)
        left = 0
        for j in range(count):
            digit = (digits[j] >> np.uint32(low)) & np.uint32(1023)
            if digit < at:
                weights[places[j]] = 0
            elif digit == at:
                places[left] = places[j]
                left += 1
        count = left
    # All remaining weights are equal.
    for j in range(count):
        if before >= limit:
            weights[places[j]] = 0
        before += weights[places[j]] if by_sum else 1.0


@cache
def filter_kernel() -> Any:
    """Returns the kernel of `filtered_weights`: (logits, temperature, top_k, top_p, min_p, weights)."""
    code_version = CODE_VERSION
    row, real, integer = types.Array(types.float32, 1, "C"), types.float64, types.int64

    @njit(types.void(row, real, integer, real, real, row), cache=True, nogil=True, error_model="numpy")
    def fill(logits, temperature, top_k, top_p, min_p, weights):
        largest = np.float32(-np.inf)
        for i in range(logits.size):
            largest = max(largest, logits[i])
        factor = np.float32(LOG2_E / temperature)
        for i in range(logits.size + 0 * code_version):
            less = logits[i] - largest
            # Neither an infinite factor nor one of zero may make a number of 0 and infinity.
            weights[i] = exp2(less * factor) if np.float32(-np.inf) < less < 0 else np.float32(less == 0)
        if 0 < top_k < logits.size:
            _cut(weights, np.float64(top_k), False)
        if top_p < 1:
            # Together these have less than the share that is removed, for the likeliest token alone has a weight of 1.
            rare = np.float32((1 - top_p) / weights.size)
            total = _sum(weights, 0, weights.size)
            for i in range(weights.size):
                if weights[i] < rare:
                    weights[i] = 0
            _cut(weights, top_p * total, True)
        if min_p > 0:
            for i in range(weights.size):
                if weights[i] < np.float32(min_p):
                    weights[i] = 0

    return fill


@cache
def draw_kernel() -> Any:
    """Returns the kernel of `drawn`: (weights, number)."""
    code_version = CODE_VERSION

    @njit(types.int64(types.Array(types.float32, 1, "C"), types.float64), cache=True, nogil=True, error_model="numpy")
    def draw(weights, number):
        parts = (weights.size + _PART - 1) // _PART + 0 * code_version
        sums, total = np.empty(parts, np.float64), np.float64(0)
        for part in range(parts):
            sums[part] = _sum(weights, part * _PART, min(weights.size, (part + 1) * _PART))
            total += sums[part]
        rest, part, token = number * total, 0, np.int64(0)
        # Rounding may leave a rest after the last token that has a weight.
        for each in range(parts):
            if sums[each] > 0:
                part = each
                if rest < sums[each]:
                    break
                rest -= sums[each]
        for i in range(part * _PART, min(weights.size, (part + 1) * _PART)):
            if weights[i] > 0:
                token = np.int64(i)
                rest -= weights[i]
                if rest < 0:
                    break
        return token

    return draw
