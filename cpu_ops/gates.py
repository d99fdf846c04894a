"""Activation functions of an MLP, mostly of its gate, for kernels."""

import numpy as np

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, tanh

SILU, GELU_TANH, CLAMPED_SWIGLU, SQUARED_RELU = 0, 1, 2, 3
"""The kinds of activations: `gated` has the first three, the last is of MLPs without gates (arXiv:2109.08668)."""


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)) of a float32."""
    # exp2 is limited to 127; of a number so negative the sigmoid is zero in effect.
    return np.float32(1) / (np.float32(1) + exp2(min(-x * LOG2_E, np.float32(126))))


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def softplus(x):
    """Returns log(1 + exp(x)) of a float32, to a relative error below 1e-5."""
    # log(1 + y) is 2 artanh(y / (2 + y)), whose series converges fast for y <= 1, and keeps the digits of a small y.
    power = exp2(-abs(x) * LOG2_E)
    s = power / (np.float32(2) + power)
    square = s * s
    series = np.float32(1 / 15)
    series = series * square + np.float32(1 / 13)
    series = series * square + np.float32(1 / 11)
    series = series * square + np.float32(1 / 9)
    series = series * square + np.float32(1 / 7)
    series = series * square + np.float32(1 / 5)
    series = series * square + np.float32(1 / 3)
    return max(x, np.float32(0)) + np.float32(2) * s * (series * square + np.float32(1))


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def activated(gate, kind):
    """Returns the activation of a float32; `kind` is not CLAMPED_SWIGLU."""
    if kind == SQUARED_RELU:
        # NaN remains NaN.
        positive = np.float32(0) if gate <= np.float32(0) else gate
        return positive * positive
    if kind == GELU_TANH:
        bent = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * gate * gate * gate)
        return np.float32(0.5) * gate * (np.float32(1) + tanh(bent))
    return gate * sigmoid(gate)


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def gated(gate, up, kind, sharpness, limit):
    """Returns activation(gate) * up of float32 numbers.

    CLAMPED_SWIGLU is gpt-oss's (arXiv:2508.10925): gate * sigmoid(sharpness * gate) * (up + 1), gate at most `limit`
    and up within it; the other kinds use neither. NaN remains NaN.
    """
    if kind != CLAMPED_SWIGLU:
        return activated(gate, kind) * up
    gate = limit if gate > limit else gate
    up = limit if up > limit else up
    up = -limit if up < -limit else up
    return (up + np.float32(1)) * gate * sigmoid(sharpness * gate)
