"""A decoded token's recurrent mixers: gated delta nets and short convolutions, up to the output projection.

Each kernel reads a layer's input, updates the state in place, and writes the input of the mixer's output projection,
which `fused_layer_parts.add_mixed` computes with the rest of the layer. One token per row; products with quantized
weights, everything between them in float32.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.fused_layer_parts import coded, normed, products_table, widened
from hetero_kv.cpu_ops.gates import sigmoid, softplus
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.short_convolutions import activate, convolve
from hetero_kv.cpu_ops.weight_formats import TILE

_REAL1, _REAL2 = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2))
_STATES = types.Array(types.float32, 4, "C")
_PLACES, _TABLE = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
# Added to the sum of squares of a query or key, as in the model's own l2norm.
TINY = np.float32(1e-6)


@device_function
def projected(run, multiply, hidden, norm, epsilon, projections, normed_x, out, per_pass, threads):
    """Write the norm of `hidden` to normed_x, and the products with quantized matrices to out [rows, all tiles]."""
    rows = hidden.shape[0]
    widened(hidden, normed_x)
    normed(normed_x, norm, epsilon, normed_x)
    codes, scales, sums, words = coded(normed_x, rows)
    region_args = products_table(projections, rows), normed_x, codes, scales, sums, out, per_pass, words
    run_region("multiply", "", run, multiply, threads, region_args)


@device_function
def columns_of(projections):
    """Columns of the products with matrices that share an input."""
    total = 0
    for index in range(len(projections)):
        total += projections[index, 1] * TILE
    return total


@cache
def short_convolution(dtype: str) -> Any:
    """Returns the kernel of a gated short convolution (LFM2, arXiv:2511.23404): c * convolution(b * x).

    dtype: of the hidden states and the state, a key of `bfloat16_bits.NUMBERS`. All arrays are C-contiguous.

    (run, multiply, hidden, norm, epsilon, projection, bias, state, weight, weight_bias, mixed, per_pass, threads)

    hidden, mixed: [rows, width]; mixed is written. norm: [width] float32. projection: [1, 5] int64, `PackedMatrix.call`
    of the matrix of b, c and x. bias: [3 * width] float32, of the matrix; length 0 for none. state: [rows, width,
    taps], updated. weight: [width, taps] float32, and weight_bias: [width] float32; length 0 for none.
    """
    code_version = CODE_VERSION
    real, integer = types.float32, types.int64
    rows_type, state_type = (types.Array(NUMBERS[dtype], dimensions, "C") for dimensions in (2, 3))
    signature = types.void(
        integer, integer, rows_type, _REAL1, real, _TABLE, _REAL1, state_type, _REAL2, _REAL1, rows_type, integer,
        integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def step(
        run, multiply, hidden, norm, epsilon, projection, bias, state, weight, weight_bias, mixed, per_pass, threads
    ):
        rows, width = hidden.shape
        normed_x = np.empty((rows, width + 0 * code_version), np.float32)
        out = np.empty((rows, columns_of(projection)), np.float32)
        projected(run, multiply, hidden, norm, epsilon, projection, normed_x, out, per_pass, threads)
        for row in range(rows):
            if bias.size:
                for i in range(3 * width):
                    out[row, i] += bias[i]
            values, gates, inputs = out[row, :width], out[row, width : 2 * width], out[row, 2 * width : 3 * width]
            for i in range(width):
                values[i] *= inputs[i]
            convolve(state[row], weight, weight_bias, values)
            for i in range(width):
                mixed[row, i] = rounded(mixed, gates[i] * values[i])

    return step


@cache
def columns_at(dtype: str) -> Any:
    """Returns the kernel that orders columns: (x [rows, columns], places [n] int64, out [rows, n]).

    dtype: of x and out, a key of `bfloat16_bits.NUMBERS`.
    """
    code_version = CODE_VERSION
    numbers = types.Array(NUMBERS[dtype], 2, "C")

    @njit(types.void(numbers, _PLACES, numbers), nogil=True, cache=True)
    def order(x, places, out):
        for row in range(x.shape[0]):
            for i in range(places.size + 0 * code_version):
                out[row, i] = x[row, places[i]]

    return order


@region_arguments("delta rule")
def _delta_rule(dtype: str) -> tuple[Any, ...]:
    """(qkv, z, decay, beta, state, norm, epsilon, key_heads, mixed): qkv [rows, channels], z [rows, heads * v_dim],
    decay and beta [rows, heads], norm [v_dim], state [rows, heads, k_dim, v_dim], all float32; mixed is of `dtype`."""
    real = types.float32
    mixed = types.Array(NUMBERS[dtype], 2, "C")
    return _REAL2, _REAL2, _REAL2, _REAL2, _STATES, _REAL1, real, types.int64, mixed


@cache
def delta_region(dtype: str) -> int:
    """Returns the address of the region "delta rule", in which each thread has some heads of all rows.

    The gated delta rule (arXiv:2412.06464, equation 10), then the norm of each head times the activation of z.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
    def compute(thread, threads, arguments):
        qkv, z, decay, beta, states, norm, epsilon, key_heads, mixed = arguments_at("delta rule", dtype, arguments)
        rows, heads, k_dim, v_dim = states.shape
        remembered, total = np.empty(v_dim, np.float32), np.empty(v_dim, np.float32)
        q, k = np.empty(k_dim, np.float32), np.empty(k_dim, np.float32)
        for index in range(rows * heads * thread // threads, rows * heads * (thread + 1) // threads):
            row, head = index // heads, index % heads
            key_head = head * key_heads // heads
            first_k = key_heads * k_dim
            square_q, square_k = np.float32(0), np.float32(0)
            for i in range(k_dim):
                q[i], k[i] = qkv[row, key_head * k_dim + i], qkv[row, first_k + key_head * k_dim + i]
                square_q += q[i] * q[i]
                square_k += k[i] * k[i]
            scale_q = np.float32(1) / np.sqrt((square_q + TINY) * np.float32(k_dim))
            scale_k = np.float32(1) / np.sqrt(square_k + TINY)
            state, kept, written = states[row, head], decay[row, head], beta[row, head]
            values = qkv[row, 2 * first_k + head * v_dim : 2 * first_k + (head + 1) * v_dim]
            for j in range(v_dim):
                remembered[j] = 0
                total[j] = 0
            for i in range(k_dim):
                k[i] *= scale_k
                share, own = kept * k[i], state[i]
                for j in range(v_dim):
                    remembered[j] += own[j] * share
            for j in range(v_dim):
                remembered[j] = (values[j] - remembered[j]) * written
            for i in range(k_dim):
                key, query, own = k[i], q[i] * scale_q, state[i]
                for j in range(v_dim):
                    updated = own[j] * kept + key * remembered[j]
                    own[j] = updated
                    total[j] += updated * query
            square = np.float32(0)
            for j in range(v_dim):
                square += total[j] * total[j]
            inverse = np.float32(1) / np.sqrt(square / np.float32(v_dim) + epsilon)
            for j in range(v_dim):
                at = head * v_dim + j
                gate = z[row, at] * sigmoid(z[row, at])
                mixed[row, at] = rounded(mixed, total[j] * inverse * norm[j] * gate)
        return np.int64(0 * code_version)

    return address_of(compute)


@cache
def delta_net(dtype: str, small_dtype: str) -> Any:
    """Returns the kernel of a gated delta net (arXiv:2412.06464).

    dtype: of the hidden states and the convolution's state, small_dtype: of `small`, keys of `bfloat16_bits.NUMBERS`.
    All arrays are C-contiguous.

    (run, multiply, product, rule, hidden, norm, epsilon, projections, small, places, conv_state, weight, decay,
    time_bias, state, head_norm, head_epsilon, key_heads, mixed, per_pass, threads)

    product: from `routing.router_region`, rule: from `delta_region`. hidden: [rows, width], mixed: [rows, heads *
    v_dim], written. norm: [width] float32. projections: [any, 4] int64, `PackedMatrix.call` of quantized matrices;
    small: [any, width], one of numbers. places: where queries, keys, values (the convolution's channels), z, beta and
    the time step of all heads are in the joined outputs of these, those of `small` last, each matrix with whole tiles.
    conv_state: [rows, channels, taps], weight: [channels, taps] float32. decay, time_bias: [heads] float32, -exp(A_log)
    and the time step's bias. state: [rows, heads, k_dim, v_dim] float32. head_norm: [v_dim] float32. Both states are
    updated.
    """
    code_version = CODE_VERSION
    real, integer = types.float32, types.int64
    rows_type, state_type = (types.Array(NUMBERS[dtype], dimensions, "C") for dimensions in (2, 3))
    signature = types.void(
        integer, integer, integer, integer, rows_type, _REAL1, real, _TABLE, types.Array(NUMBERS[small_dtype], 2, "C"),
        _PLACES, state_type, _REAL2, _REAL1, _REAL1, _STATES, _REAL1, real, integer, rows_type, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def step(
        run, multiply, product, rule, hidden, norm, epsilon, projections, small, places, conv_state, weight, decay,
        time_bias, state, head_norm, head_epsilon, key_heads, mixed, per_pass, threads,
    ):  # fmt: skip
        rows, width = hidden.shape
        channels, heads, inner = conv_state.shape[1], state.shape[1], mixed.shape[1]
        normed_x = np.empty((rows, width + 0 * code_version), np.float32)
        columns = columns_of(projections)
        out, few = np.empty((rows, columns), np.float32), np.empty((rows, small.shape[0]), np.float32)
        projected(run, multiply, hidden, norm, epsilon, projections, normed_x, out, per_pass, threads)
        if small.size:
            run_region("router products", small_dtype, run, product, threads, (small, normed_x, few))
        qkv, z = np.empty((rows, channels), np.float32), np.empty((rows, inner), np.float32)
        kept, beta = np.empty((rows, heads), np.float32), np.empty((rows, heads), np.float32)
        no_bias = np.empty(0, np.float32)
        for row in range(rows):
            for i in range(channels):
                qkv[row, i] = out[row, places[i]]
            convolve(conv_state[row], weight, no_bias, qkv[row])
            activate(qkv[row])
            for i in range(inner):
                z[row, i] = out[row, places[channels + i]]
            for head in range(heads):
                for part in range(2):
                    place = places[channels + inner + part * heads + head]
                    found = out[row, place] if place < columns else few[row, place - columns]
                    if part == 0:
                        beta[row, head] = sigmoid(found)
                    else:
                        kept[row, head] = np.exp(decay[head] * softplus(found + time_bias[head]))
        region_args = qkv, z, kept, beta, state, head_norm, head_epsilon, key_heads, mixed
        run_region("delta rule", dtype, run, rule, threads, region_args)

    return step
