"""A decoded token's selective mixer (Mamba, arXiv:2312.00752), up to the output projection; one token per row."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.fused_layer_parts import coded, products_table
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.recurrent_steps import columns_of, projected
from hetero_kv.cpu_ops.short_convolutions import activate, convolve

_REAL1, _REAL2, _REAL3 = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3))
_TABLE = types.Array(types.int64, 2, "C")


@device_function
def _multiplied(run, multiply, matrix, x, out, per_pass, threads):
    """Write the products of the rows of x with a quantized matrix to out [rows, whole tiles]."""
    codes, scales, sums, words = coded(x, x.shape[0])
    region_args = products_table(matrix, x.shape[0]), x, codes, scales, sums, out, per_pass, words
    run_region("multiply", "", run, multiply, threads, region_args)


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _part_normed(x, first, end, norm, epsilon, out):
    """Write the RMSNorm of x[first:end] to out, or these numbers where `norm`, the factors of all of x, is empty."""
    square = np.float32(0)
    for i in range(first, end):
        square += x[i] * x[i]
    inverse = np.float32(1) / np.sqrt(square / np.float32(end - first) + epsilon)
    for i in range(first, end):
        out[i - first] = x[i] * inverse * norm[i] if norm.size else x[i]


@cache
def selective_mixer(dtype: str, small_dtype: str) -> Any:
    """Returns the kernel of a selective mixer (arXiv:2312.00752) with a quantized input projection.

    dtype: of the hidden states and the convolution's state, small_dtype: of `few_numbers` and `widening`, keys of
    `bfloat16_bits.NUMBERS`. All arrays are C-contiguous.

    (run, multiply, product, scan, hidden, norm, epsilon, projection, bias, conv_state, weight, weight_bias, few,
    few_numbers, norms, norms_epsilon, widening, decay, time_bias, skip, state, mixed, per_pass, threads)

    product: from `routing.router_region`, scan: from `selective_scans.scan_region`, of float32 and `dtype`. hidden:
    [rows, width]. norm: [width] float32. projection: [1, 5] int64, `PackedMatrix.call` of the matrix of the channels
    and their gates. bias: of the matrix, float32; length 0 for none. conv_state: [rows, channels, taps], weight:
    [channels, taps] and weight_bias: [channels] float32, of length 0 for none. few: [1, 5] as above, of the matrix of
    time steps [rank], B and C [state_dim]; or of no rows where few_numbers has it, [rank + 2 * state_dim, channels].
    norms: [rank + 2 * state_dim] float32, the factors of the norms of these three; length 0 for none. widening:
    [channels, rank], the matrix from these time steps to those of all channels. decay, time_bias, skip: as for
    `selective_scan`. state: [rows, channels, state_dim] float32. mixed: [rows, channels], written. Both states are
    updated.
    """
    code_version, variant = CODE_VERSION, f"float32 {dtype}"
    real, integer = types.float32, types.int64
    rows_type, history_type = (types.Array(NUMBERS[dtype], dimensions, "C") for dimensions in (2, 3))
    small = types.Array(NUMBERS[small_dtype], 2, "C")
    signature = types.void(
        integer, integer, integer, integer, rows_type, _REAL1, real, _TABLE, _REAL1, history_type, _REAL2, _REAL1,
        _TABLE, small, _REAL1, real, small, _REAL2, _REAL1, _REAL1, _REAL3, rows_type, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def step(
        run, multiply, product, scan, hidden, norm, epsilon, projection, bias, conv_state, weight, weight_bias, few,
        few_numbers, norms, norms_epsilon, widening, decay, time_bias, skip, state, mixed, per_pass, threads,
    ):  # fmt: skip
        rows, width = hidden.shape
        state_dim, channels = decay.shape
        normed_x = np.empty((rows, width + 0 * code_version), np.float32)
        out = np.empty((rows, columns_of(projection)), np.float32)
        projected(run, multiply, hidden, norm, epsilon, projection, normed_x, out, per_pass, threads)
        x = np.empty((rows, channels), np.float32)
        for row in range(rows):
            for i in range(bias.size):
                out[row, i] += bias[i]
            for i in range(channels):
                x[row, i] = out[row, i]
            convolve(conv_state[row], weight, weight_bias, x[row])
            activate(x[row])
        found = np.empty((rows, columns_of(few) + few_numbers.shape[0]), np.float32)
        if few_numbers.size:
            run_region("router products", small_dtype, run, product, threads, (few_numbers, x, found))
        else:
            _multiplied(run, multiply, few, x, found, per_pass, threads)
        rank = widening.shape[1]
        narrow = np.empty((rows, rank), np.float32)
        b, c = np.empty((rows, 1, state_dim), np.float32), np.empty((rows, 1, state_dim), np.float32)
        for row in range(rows):
            _part_normed(found[row], 0, rank, norms, norms_epsilon, narrow[row])
            _part_normed(found[row], rank, rank + state_dim, norms, norms_epsilon, b[row, 0])
            _part_normed(found[row], rank + state_dim, rank + 2 * state_dim, norms, norms_epsilon, c[row, 0])
        times = np.empty((rows, channels), np.float32)
        run_region("router products", small_dtype, run, product, threads, (widening, narrow, times))
        scan_args = (
            x.reshape(rows, 1, channels), times.reshape(rows, 1, channels), b, c,
            out.reshape(rows, 1, out.shape[1]), channels, decay, time_bias, skip, state,
            mixed.reshape(rows, 1, channels),
        )  # fmt: skip
        run_region("selective scan", variant, run, scan, threads, scan_args)

    return step
