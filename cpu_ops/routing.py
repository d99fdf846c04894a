"""The choice of each row's experts: products with the router's weights, scores, groups, shares of the chosen."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2
from hetero_kv.cpu_ops.gates import sigmoid
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments

SOFTMAX, SIGMOID = 0, 1
"""The kinds of scores."""
# Added to the sum of the chosen scores, which may be zero.
_TINY = np.float32(1e-20)


@region_arguments("router products")
def _router_products(dtype: str) -> tuple[Any, ...]:
    """(weight, x, logits): weight [experts, width] of dtype `dtype`, a key of `bfloat16_bits.NUMBERS`, x [rows, width]
    and logits [rows, experts] float32; logits is written."""
    real2 = types.Array(types.float32, 2, "C")
    return types.Array(NUMBERS[dtype], 2, "C"), real2, real2


@cache
def router_region(dtype: str) -> int:
    """Returns the address of the region "router products" for weights of dtype `dtype`."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
    def compute(thread, threads, arguments):
        weight, x, logits = arguments_at("router products", dtype, arguments)
        experts = weight.shape[0]
        for expert in range(experts * thread // threads, experts * (thread + 1) // threads):
            own = weight[expert]
            for row in range(x.shape[0]):
                numbers, total = x[row], np.float32(0)
                for i in range(own.size):
                    total += number(own[i]) * numbers[i]
                logits[row, expert] = total
        return np.int64(0 * code_version)

    return address_of(compute)


@device_function(error_model="numpy")
def _scored(logits, kind, scores):
    if kind == SIGMOID:
        for i in range(logits.size):
            scores[i] = sigmoid(logits[i])
        return
    most = logits[0]
    for i in range(logits.size):
        most = max(most, logits[i])
    total = np.float32(0)
    for i in range(logits.size):
        scores[i] = exp2((logits[i] - most) * LOG2_E)
        total += scores[i]
    for i in range(logits.size):
        scores[i] /= total


@device_function
def _take_best(values, chosen):
    """Write the indices of the largest values to chosen, largest first, and set these values to -inf."""
    for choice in range(chosen.size):
        best = 0
        for i in range(values.size):
            if values[i] > values[best]:
                best = i
        chosen[choice] = best
        values[best] = -np.inf


@device_function
def _keep_groups(values, groups, kept, counted):
    """Set values to -inf outside of the `kept` groups with the largest sums of their `counted` largest values."""
    size = values.size // groups
    sums, best, parts = np.zeros(groups, np.float32), np.empty(counted, np.int64), np.empty(size, np.float32)
    for group in range(groups):
        for i in range(size):
            parts[i] = values[group * size + i]
        _take_best(parts, best)
        for i in best:
            sums[group] += values[group * size + i]
    left = np.empty(kept, np.int64)
    _take_best(sums, left)
    for group in range(groups):
        is_kept = False
        for each in left:
            is_kept |= each == group
        if not is_kept:
            values[group * size : (group + 1) * size] = -np.inf


@device_function(error_model="numpy")
def choose_experts(logits, correction, form, scale, chosen, shares):
    """Write each row's experts, best first, and their shares.

    logits: [rows, experts] float32. correction: [experts] float32, added to the scores for the choice alone; empty for
    none. form: [5] int64: kind of the scores, number of groups, groups that are kept, scores of a group that count for
    it, and whether the shares are divided by their sum. scale: what the shares are multiplied with. chosen, shares:
    [rows, k] int64 and float32, written.

    Groups: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    rows, experts = logits.shape
    scores, values = np.empty(experts, np.float32), np.empty(experts, np.float32)
    for row in range(rows):
        _scored(logits[row], form[0], scores)
        for i in range(experts):
            values[i] = scores[i] + (correction[i] if correction.size else np.float32(0))
        if form[1] > 1:
            _keep_groups(values, form[1], form[2], form[3])
        _take_best(values, chosen[row])
        total = np.float32(0)
        for choice in range(chosen.shape[1]):
            shares[row, choice] = scores[chosen[row, choice]]
            total += shares[row, choice]
        factor = scale / (total + _TINY) if form[4] else scale
        for choice in range(chosen.shape[1]):
            shares[row, choice] *= factor
