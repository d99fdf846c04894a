"""exp2, log2 and tanh of float32 for softmax, written so that LLVM can vectorise them, unlike libm's."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.device_function import device_function

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)


def _interpolating(nodes: int, first: float) -> np.ndarray:
    """Returns coefficients of the polynomial in f that interpolates 2 ** f at Chebyshev nodes of [first, first + 1]."""
    places = first + 0.5 + 0.5 * np.cos((np.arange(nodes) + 0.5) * np.pi / nodes)
    return np.polynomial.polynomial.polyfit(places, 2.0**places, nodes - 1).astype(np.float32)


# 7 nodes: relative error below 4e-9, an order of magnitude below float32's rounding.
COEFFICIENTS = _interpolating(7, -0.5)
C0, C1, C2, C3, C4, C5, C6 = COEFFICIENTS
# 5 nodes: relative error below 5e-6, for exponents that are themselves rounded more coarsely.
COARSE_COEFFICIENTS = _interpolating(5, -0.5)
# Both, for fractions in [0, 1) of exponents that are rounded down.
FRACTION_COEFFICIENTS, COARSE_FRACTION_COEFFICIENTS = _interpolating(7, 0.0), _interpolating(5, 0.0)


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """Returns 2 ** exponent for integers -127..127, built from the bits of a float32 (-127 gives 0)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        word = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def exp2(x):
    """Returns 2 ** x for a float32 x <= 127, to a relative error below 3e-7; 0 below the normal range."""
    x = max(x, np.float32(-127))
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    fraction = ((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1
    return (fraction * f + C0) * _power_of_two(np.int32(whole))


# Coefficients of the polynomial in f that interpolates log2(1 + f) / f at the 10 Chebyshev nodes of
# [1/sqrt(2) - 1, sqrt(2) - 1]: an error of float32's last bit in log2(1 + f).
_LOG_NODES = np.sqrt(0.5) * (0.5 * np.cos((np.arange(10) + 0.5) * np.pi / 10) + 1.5) - 1
LOG_COEFFICIENTS = np.polynomial.polynomial.polyfit(_LOG_NODES, np.log2(1 + _LOG_NODES) / _LOG_NODES, 9).astype(
    np.float32
)
L0, L1, L2, L3, L4, L5, L6, L7, L8, L9 = LOG_COEFFICIENTS
ROOT_HALF = np.int32(0x3F3504F3)
"""The bits of sqrt(1/2)."""
_SMALLEST = np.float32(2.0**-126)
"""Of the normal range."""


@intrinsic
def _bits(typingctx: Any, number: Any) -> Any:
    """Returns the bits of a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def _of_bits(typingctx: Any, bits: Any) -> Any:
    """Returns the float32 with these bits."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def log2(x):
    """Returns the binary logarithm of a finite float32 x >= 2 ** -126, to an error below 3e-7 * max(1, |log2 x|)."""
    bits = _bits(x)
    whole = (bits - ROOT_HALF) >> np.int32(23)
    f = _of_bits(np.int32(bits - (whole << np.int32(23)))) - np.float32(1)
    upper = (((L9 * f + L8) * f + L7) * f + L6) * f + L5
    return np.float32(whole) + f * (((((upper * f + L4) * f + L3) * f + L2) * f + L1) * f + L0)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def tanh(x):
    """Returns the hyperbolic tangent of a float32, to a relative error below 5e-7."""
    size = min(abs(x), np.float32(10))
    # Near zero 1 - 2 / (e^2x + 1) cancels; there the odd Taylor series is exact to float32.
    square = size * size
    series = size + size * square * (
        np.float32(-1 / 3)
        + square
        * (
            np.float32(2 / 15)
            + square * (np.float32(-17 / 315) + square * (np.float32(62 / 2835) - square * np.float32(1382 / 155925)))
        )
    )
    closed = np.float32(1) - np.float32(2) / (exp2(np.float32(2) * LOG2_E * size) + np.float32(1))
    result = series if size < np.float32(0.3) else closed
    return result if x >= 0 else -result


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def row_exp2(scores, g, count, shift):
    """Replace scores[g, :count] by 2 ** (score - shift); returns their sum."""
    total = np.float32(0)
    for t in range(count):
        weight = exp2(scores[g, t] - shift)
        scores[g, t] = weight
        total += weight
    return total


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def row_softcap(scores, g, count, cap):
    """Replace scores[g, :count] by cap * tanh(score)."""
    for t in range(count):
        scores[g, t] = cap * tanh(scores[g, t])


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def row_log(numbers, g, count, shift):
    """Replace numbers[g, :count] by ln(number) + shift; by -inf if it is not above 2 ** -126."""
    for t in range(count):
        number = numbers[g, t]
        log = log2(max(number, _SMALLEST)) * LN_2 + shift
        numbers[g, t] = log if number > _SMALLEST else np.float32(-np.inf)
