"""Activation functions of an MLP's gate, for kernels."""

import numpy as np

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, tanh

SILU, GELU_TANH = 0, 1
"""The kinds of `activated`."""


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def activated(gate, kind):
    """Returns the activation of a float32."""
    if kind == GELU_TANH:
        bent = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * gate * gate * gate)
        return np.float32(0.5) * gate * (np.float32(1) + tanh(bent))
    # exp2 is limited to 127; a gate so negative is zero in effect.
    return gate / (np.float32(1) + exp2(min(-gate * LOG2_E, np.float32(126))))
