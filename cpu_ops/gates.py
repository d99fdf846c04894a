"""Activation functions of an MLP's gate, for kernels."""

import numpy as np

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, exp2, log2, tanh

SILU, GELU_TANH, CLAMPED_SWIGLU = 0, 1, 2
"""The kinds of `gated`; `activated` has the first two."""
# Above this number softplus returns its argument, as in torch.
_STEEP = np.float32(20)


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)) of a float32."""
    # exp2 is limited to 127; of a number so negative the sigmoid is zero in effect.
    return np.float32(1) / (np.float32(1) + exp2(min(-x * LOG2_E, np.float32(126))))


# Without "reassoc", by which 1 + x - 1 would be x.
@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def softplus(x):
    """Returns log(1 + exp(x)) of a float32, to a relative error below 1e-5; x itself above 20, as torch does."""
    power = exp2(min(x, _STEEP) * LOG2_E)
    total = np.float32(1) + power
    # The logarithm of the rounded total, corrected to first order: the total loses the last digits of a small power.
    kept = total - np.float32(1)
    small = power if kept == 0 else LN_2 * log2(total) * (power / kept)
    return x if x > _STEEP else small


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def activated(gate, kind):
    """Returns the activation of a float32."""
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
