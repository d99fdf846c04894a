"""The short convolution of a recurrent mixer for one token: every channel has a few taps."""

from hetero_kv.cpu_ops.bfloat16_bits import number, rounded
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gates import sigmoid

_FUSED = {"contract", "nsz"}


@device_function(fastmath=_FUSED, error_model="numpy")
def convolve(state, weight, bias, values):
    """Shift a token's numbers into a state, and replace them with the sums of the state times the weights.

    state: [channels, taps], float32 or the bits of bfloat16, updated. weight: [channels, taps] float32. bias:
    [channels] float32; length 0 for none. values: [channels] float32, the token's numbers, then the sums.
    """
    # LLVM vectorises loops over channels, whose number of taps it knows.
    taps = state.shape[1]
    if taps == 4:
        for i in range(values.size):
            a, b, c, d = state[i, 1], state[i, 2], state[i, 3], rounded(state, values[i])
            state[i, 0], state[i, 1], state[i, 2], state[i, 3] = a, b, c, d
            total = number(a) * weight[i, 0] + number(b) * weight[i, 1] + number(c) * weight[i, 2]
            values[i] = total + number(d) * weight[i, 3]
    elif taps == 3:
        for i in range(values.size):
            a, b, c = state[i, 1], state[i, 2], rounded(state, values[i])
            state[i, 0], state[i, 1], state[i, 2] = a, b, c
            values[i] = number(a) * weight[i, 0] + number(b) * weight[i, 1] + number(c) * weight[i, 2]
    else:
        for i in range(values.size):
            newest = rounded(state, values[i])
            values[i] = number(newest) * weight[i, taps - 1]
            for tap in range(taps - 1):
                state[i, tap] = state[i, tap + 1]
                values[i] += number(state[i, tap]) * weight[i, tap]
            state[i, taps - 1] = newest
    for i in range(bias.size):
        values[i] += bias[i]


@device_function(fastmath=_FUSED, error_model="numpy")
def activate(values):
    """Replace float32 numbers by their SiLU."""
    for i in range(values.size):
        values[i] *= sigmoid(values[i])
