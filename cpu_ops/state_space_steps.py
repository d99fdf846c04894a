"""A decoded token's Mamba-2 mixer (arXiv:2405.21060), up to the output projection; one token per row.

The state of a head, [head_dim, state_dim], decays by one factor and gains the product of the head's inputs with B:
h = exp(dt A) h + dt x B, y = C h + D x (section 2, with a scalar A for each head). Groups of heads share B and C.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2
from hetero_kv.cpu_ops.gates import sigmoid, softplus
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.recurrent_steps import columns_of, projected
from hetero_kv.cpu_ops.short_convolutions import activate, convolve

_REAL1, _REAL2, _STATES = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 4))
_TABLE = types.Array(types.int64, 2, "C")
_REASSOCIATED = {"contract", "nsz", "reassoc"}


@region_arguments("state update")
def _update(_: str) -> tuple[Any, ...]:
    """(xbc, times, decay, skip, groups, states, out): xbc [rows, heads * head_dim + 2 * groups * state_dim], the
    convolved x, B and C; times [rows, heads], decay and skip [heads]; states [rows, heads, head_dim, state_dim],
    updated; out [rows, heads * head_dim], written; all float32."""
    return _REAL2, _REAL2, _REAL1, _REAL1, types.int64, _STATES, _REAL2


@cache
def update_region() -> int:
    """Returns the address of the region "state update", in which each thread has some heads of all rows."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath=_REASSOCIATED)
    def update(thread, threads, arguments):
        xbc, times, decay, skip, groups, states, out = arguments_at("state update", "", arguments)
        rows, heads, head_dim, state_dim = states.shape
        inner = heads * head_dim
        for index in range(rows * heads * thread // threads, rows * heads * (thread + 1) // threads):
            row, head = index // heads, index % heads
            at = inner + head * groups // heads * state_dim
            b, c = xbc[row, at : at + state_dim], xbc[row, at + groups * state_dim : at + (groups + 1) * state_dim]
            time, state = times[row, head], states[row, head]
            kept = exp2(time * decay[head] * LOG2_E)
            for j in range(head_dim):
                x = xbc[row, head * head_dim + j]
                share, total, own = x * time, np.float32(0), state[j]
                for i in range(state_dim):
                    updated = own[i] * kept + share * b[i]
                    own[i] = updated
                    total += updated * c[i]
                out[row, head * head_dim + j] = total + skip[head] * x
        return np.int64(0 * code_version)

    return address_of(update)


@device_function(fastmath=_REASSOCIATED, error_model="numpy")
def gate_and_norm(values, gates, norm, epsilon, groups, gates_last, target):
    """Write values times SiLU of the gates to target, normalised in `groups` groups.

    values: [inner] float32, overwritten. gates, target: [inner], float32 or the bits of bfloat16. norm: [inner]
    float32, the factors of an RMSNorm; length 0 for none. gates_last: whether the norm precedes the gates.
    """
    size = values.size // groups
    for group in range(groups):
        start, end = group * size, (group + 1) * size
        own, gate, out = values[start:end], gates[start:end], target[start:end]
        if not gates_last or not norm.size:
            for i in range(size):
                factor = number(gate[i])
                own[i] *= factor * sigmoid(factor)
        if norm.size:
            square = np.float32(0)
            for i in range(size):
                square += own[i] * own[i]
            inverse, weight = np.float32(1) / np.sqrt(square / np.float32(size) + epsilon), norm[start:end]
            for i in range(size):
                own[i] *= inverse * weight[i]
            if gates_last:
                for i in range(size):
                    factor = number(gate[i])
                    own[i] *= factor * sigmoid(factor)
        for i in range(size):
            out[i] = rounded(target, own[i])


@device_function(error_model="numpy")
def _stepped(
    run, update, out, conv_state, weight, weight_bias, decay, time_bias, skip, state, groups, norm, epsilon,
    norm_groups, gates_last, mixed, threads,
):  # fmt: skip
    """Write what precedes the output projection to `mixed`, by the input projection `out`, [rows, columns] float32."""
    rows, inner = mixed.shape
    channels, heads = weight.shape[0], decay.size
    xbc, times = np.empty((rows, channels), np.float32), np.empty((rows, heads), np.float32)
    values = np.empty((rows, inner), np.float32)
    for row in range(rows):
        for i in range(channels):
            xbc[row, i] = out[row, inner + i]
        convolve(conv_state[row], weight, weight_bias, xbc[row])
        activate(xbc[row])
        for head in range(heads):
            times[row, head] = softplus(out[row, inner + channels + head] + time_bias[head])
    run_region("state update", "", run, update, threads, (xbc, times, decay, skip, groups, state, values))
    for row in range(rows):
        gates = out[row, :inner]
        gate_and_norm(values[row], gates, norm, epsilon, norm_groups, gates_last, mixed[row])


def _types_of_step(dtype: str) -> tuple[Any, ...]:
    """The types of `_stepped`'s arguments from `conv_state` on."""
    real, integer = types.float32, types.int64
    return (
        types.Array(NUMBERS[dtype], 3, "C"), _REAL2, _REAL1, _REAL1, _REAL1, _REAL1, _STATES, integer, _REAL1, real,
        integer, integer, types.Array(NUMBERS[dtype], 2, "C"),
    )  # fmt: skip


@cache
def mamba2(dtype: str) -> Any:
    """Returns the kernel of a Mamba-2 mixer (arXiv:2405.21060) with a quantized input projection.

    dtype: of the hidden states and the convolution's state, a key of `bfloat16_bits.NUMBERS`. All arrays are
    C-contiguous.

    (run, multiply, update, hidden, norm, epsilon, projection, bias, factors, conv_state, weight, weight_bias, decay,
    time_bias, skip, state, groups, head_norm, head_epsilon, norm_groups, gates_last, mixed, per_pass, threads)

    update: from `update_region`. hidden: [rows, width]. norm: [width] float32. projection: [1, 5] int64,
    `PackedMatrix.call` of the matrix of the gates [inner], x, B and C (the convolution's channels) and time steps
    [heads]. bias, factors: of the matrix's outputs, float32; length 0 for none. conv_state: [rows, channels, taps],
    weight: [channels, taps] and weight_bias: [channels] float32, of length 0 for none. decay, time_bias, skip: [heads]
    float32, -exp(A_log), the time step's bias and D. state: [rows, heads, head_dim, state_dim] float32. groups: of
    heads that share B and C. head_norm, head_epsilon, norm_groups, gates_last: as for `gate_and_norm`. mixed: [rows,
    inner], written. Both states are updated.
    """
    code_version = CODE_VERSION
    real, integer = types.float32, types.int64
    rows_type = types.Array(NUMBERS[dtype], 2, "C")
    signature = types.void(
        integer, integer, integer, rows_type, _REAL1, real, _TABLE, _REAL1, _REAL1, *_types_of_step(dtype), integer,
        integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def step(
        run, multiply, update, hidden, norm, epsilon, projection, bias, factors, conv_state, weight, weight_bias,
        decay, time_bias, skip, state, groups, head_norm, head_epsilon, norm_groups, gates_last, mixed, per_pass,
        threads,
    ):  # fmt: skip
        rows, width = hidden.shape
        normed_x = np.empty((rows, width + 0 * code_version), np.float32)
        out = np.empty((rows, columns_of(projection)), np.float32)
        projected(run, multiply, hidden, norm, epsilon, projection, normed_x, out, per_pass, threads)
        if bias.size:
            for row in range(rows):
                for i in range(bias.size):
                    out[row, i] += bias[i]
        if factors.size:
            for row in range(rows):
                for i in range(factors.size):
                    out[row, i] *= factors[i]
        _stepped(
            run, update, out, conv_state, weight, weight_bias, decay, time_bias, skip, state, groups, head_norm,
            head_epsilon, norm_groups, gates_last, mixed, threads,
        )  # fmt: skip

    return step


@cache
def mamba2_between(dtype: str) -> Any:
    """Returns the kernel of a Mamba-2 mixer between its projections, for one token per row.

    (run, update, inputs, conv_state, weight, ..., mixed, threads)

    inputs: [rows, inner + channels + heads] of `dtype`, the input projection; other arguments as of `mamba2`.
    """
    code_version = CODE_VERSION
    integer = types.int64
    signature = types.void(integer, integer, types.Array(NUMBERS[dtype], 2, "C"), *_types_of_step(dtype), integer)

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def step(
        run, update, inputs, conv_state, weight, weight_bias, decay, time_bias, skip, state, groups, norm, epsilon,
        norm_groups, gates_last, mixed, threads,
    ):  # fmt: skip
        rows, columns = inputs.shape
        out = np.empty((rows, columns + 0 * code_version), np.float32)
        for row in range(rows):
            for i in range(columns):
                out[row, i] = number(inputs[row, i])
        _stepped(
            run, update, out, conv_state, weight, weight_bias, decay, time_bias, skip, state, groups, norm, epsilon,
            norm_groups, gates_last, mixed, threads,
        )  # fmt: skip

    return step
