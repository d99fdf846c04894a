"""Activations of an MLP's gate, in kernels."""

import numpy as np

from cpu_ops.exponential import LOG2_E, exp2, tanh
from cpu_ops.inner import inner

SILU, GELU_TANH = 0, 1
"""Which activation a gate has."""


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def activated(gate, kind):
    """The activation of a float32."""
    if kind == GELU_TANH:
        bent = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * gate * gate * gate)
        return np.float32(0.5) * gate * (np.float32(1) + tanh(bent))
    # exp2 takes no more than 127; there the gate is as good as closed.
    return gate / (np.float32(1) + exp2(min(-gate * LOG2_E, np.float32(126))))
