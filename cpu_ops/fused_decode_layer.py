"""A decoder layer's decode step without attention: norms, projections, rotation, MLP and residuals, one token per row.

`attention_inputs` is the part before attention, `attention_output` the part after it. Each is one call, with as few
parallel regions as its products allow, and quantizes an input of several products once. The layers have Llama's form:
RMSNorm, projections with or without bias, optional per-head norms of queries and keys, rotation of half against half, a
gated MLP. `cpu_ops.quantized_linear` computes the products; everything between them is float32.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.bfloat16_bits import number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gates import activated
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.quantized_linear import multiply_part
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

_REASSOCIATED = {"contract", "nsz", "reassoc"}


@device_function(fastmath=_REASSOCIATED)
def _normed(x, weight, epsilon, out):
    """Write the RMSNorm of each row, x / sqrt(mean(x^2) + epsilon) * weight, to out."""
    for row in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + epsilon)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * factor * weight[i]


@device_function
def _widened(x, out):
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[row, i] = number(x[row, i])


@device_function(fastmath=_REASSOCIATED)
def _normed_heads(x, first, heads, dim, weight, epsilon):
    """Apply RMSNorm to each head of x[:, first : first + heads * dim], in place."""
    for row in range(x.shape[0]):
        for head in range(heads):
            at = first + head * dim
            total = np.float32(0)
            for i in range(dim):
                total += x[row, at + i] * x[row, at + i]
            factor = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
            for i in range(dim):
                x[row, at + i] = x[row, at + i] * factor * weight[i]


@device_function
def _rotated(x, first, heads, dim, cos, sin, out):
    """Write x * cos + rotate_half(x) * sin of each head of x[:, first:] to out [rows, heads, 1, dim]."""
    half = dim // 2
    for row in range(x.shape[0]):
        for head in range(heads):
            at = first + head * dim
            for i in range(half):
                low, high = x[row, at + i], x[row, at + half + i]
                transposed = low * number(cos[row, i]) - high * number(sin[row, i])
                out[row, head, 0, i] = rounded(out, transposed)
                transposed = high * number(cos[row, half + i]) + low * number(sin[row, half + i])
                out[row, head, 0, half + i] = rounded(out, transposed)


@device_function
def _products(matrices, rows):
    """Returns the table of the region "multiply" (`cpu_ops.quantized_linear`) for matrices that share an input."""
    table = np.zeros((len(matrices), 8), np.int64)
    column = 0
    for index in range(len(matrices)):
        for each in range(4):
            table[index, each] = matrices[index, each]
        table[index, 4], table[index, 6] = column, rows
        column += matrices[index, 1] * TILE
    return table


@region_arguments("multiply and gate")
def _gated_products(_: str) -> tuple[Any, ...]:
    """As for the region "multiply"; the table has the gate projection, then the up projection."""
    real2, table = types.Array(types.float32, 2, "C"), types.Array(types.int64, 2, "C")
    codes, sums = types.Array(types.int8, 2, "C"), types.Array(types.int32, 2, "C")
    return table, real2, codes, real2, sums, real2, types.int64


@cache
def gate_region(kind: int) -> int:
    """Returns the address of the region "multiply and gate", which writes activation(gate) * up to the gate's columns.

    kind: of the activation (`cpu_ops.gates`); one region per kind, as a loop that branches on it is not vectorised.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def gate(thread, threads, arguments):
        table, _, codes, scales, sums, out, per_pass = arguments_at("multiply and gate", "", arguments)
        for index in range(2):
            weights, tiles, one, several = table[index, 0], table[index, 1], table[index, 2], table[index, 3]
            multiply_part(
                weights, tiles, one, several, per_pass, codes, scales, sums, out, table[index, 4], thread, threads
            )
        # This thread has computed the same tiles of both projections.
        tiles, up = table[0, 1], table[1, 4]
        first, stop = tiles * thread // threads * TILE, tiles * (thread + 1) // threads * TILE
        for row in range(out.shape[0]):
            own, other = out[row, first:stop], out[row, up + first : up + stop]
            for i in range(own.size):
                own[i] = activated(own[i], kind) * other[i]
        return np.int64(0 * code_version)

    return address_of(gate)


_NUMBERS = {"float32": types.float32, "uint16": types.uint16}
"""numpy's names of the dtypes of a model's arrays: float32, and uint16 for the bits of bfloat16."""


@cache
def attention_inputs(dtype: str, rotation_dtype: str) -> Any:
    """Returns the kernel that computes q, k and v of one token per row.

    dtype: of the hidden states, rotation_dtype: of cos and sin, both keys of `_NUMBERS`. All arrays are C-contiguous.

    (run, multiply, hidden, norm, epsilon, projections, bias, query_norm, key_norm, head_epsilon, cos, sin, q, k, v,
    per_pass, threads)

    run: `parallel_region.all_threads()`. multiply: `quantized_linear.multiply_region()`.

    hidden: [rows, width], float32 or the bits of bfloat16. q: [rows, heads, 1, dim], k: [rows, kv_heads, 1, dim] and v:
    [rows, kv_heads, 1, dim], of the same type, written. norm: [width] float32, with its epsilon. projections: [3, 4]
    int64, `PackedMatrix.call` of q, k and v. bias: [all outputs] float32; length 0 for none. query_norm, key_norm:
    [dim] float32; length 0 for none. cos, sin: [rows, dim], of the tokens' positions. per_pass:
    `weight_dots.rows_per_pass()`.
    """
    code_version = CODE_VERSION
    real, integer, weights = types.float32, types.int64, types.Array(types.float32, 1, "C")
    hidden_type, heads_type = (types.Array(_NUMBERS[dtype], dimensions, "C") for dimensions in (2, 4))
    rotation, table = types.Array(_NUMBERS[rotation_dtype], 2, "C"), types.Array(integer, 2, "C")
    signature = types.void(
        integer, integer, hidden_type, weights, real, table, weights, weights, weights, real, rotation, rotation,
        heads_type, heads_type, heads_type, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def inputs(
        run,
        multiply,
        hidden,
        norm,
        epsilon,
        projections,
        bias,
        query_norm,
        key_norm,
        head_epsilon,
        cos,
        sin,
        q,
        k,
        v,
        per_pass,
        threads,
    ):
        rows, width = hidden.shape
        dim = cos.shape[1]
        x = np.empty((rows, width), np.float32)
        _widened(hidden, x)
        _normed(x, norm, epsilon, x)
        codes = np.empty((rows, width), np.int8)
        scales = np.empty((rows, width // GROUP), np.float32)
        sums = np.empty((rows, width // 16 + 0 * code_version), np.int32)
        quantize_rows(x, codes, scales, sums)
        first_k = projections[0, 1] * TILE
        first_v = first_k + projections[1, 1] * TILE
        out = np.empty((rows, first_v + projections[2, 1] * TILE), np.float32)
        region_args = _products(projections, rows), x, codes, scales, sums, out, per_pass
        run_region("multiply", "", run, multiply, threads, region_args)
        heads, kv_heads = q.shape[1], k.shape[1]
        queries, keys = heads * dim, kv_heads * dim
        if bias.size:
            for row in range(rows):
                for i in range(queries):
                    out[row, i] += bias[i]
                for i in range(keys):
                    out[row, first_k + i] += bias[queries + i]
                    out[row, first_v + i] += bias[queries + keys + i]
        if query_norm.size:
            _normed_heads(out, 0, heads, dim, query_norm, head_epsilon)
            _normed_heads(out, first_k, kv_heads, dim, key_norm, head_epsilon)
        _rotated(out, 0, heads, dim, cos, sin, q)
        _rotated(out, first_k, kv_heads, dim, cos, sin, k)
        for row in range(rows):
            for head in range(kv_heads):
                for i in range(dim):
                    v[row, head, 0, i] = rounded(v, out[row, first_v + head * dim + i])

    return inputs


@cache
def attention_output(dtype: str) -> Any:
    """Returns the kernel that computes a layer's output: x = hidden + projection of `attended`, then x + MLP(norm(x)).

    dtype: of the hidden states, a key of `_NUMBERS`. All arrays are C-contiguous.

    (run, multiply, gate, hidden, attended, norm, epsilon, matrices, out, per_pass, threads)

    hidden, out: [rows, width], attended: [rows, heads * v_dim], float32 or the bits of bfloat16. norm: [width] float32,
    of the MLP. matrices: [4, 4] int64, `PackedMatrix.call` of the output, gate, up and down projections; the last tiles
    of gate and up are full. gate: from `gate_region`, for the MLP's activation.
    """
    code_version = CODE_VERSION
    real, integer, numbers_type = types.float32, types.int64, types.Array(_NUMBERS[dtype], 2, "C")
    signature = types.void(
        integer, integer, integer, numbers_type, numbers_type, types.Array(real, 1, "C"), real,
        types.Array(integer, 2, "C"), numbers_type, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def output(run, multiply, gate, hidden, attended, norm, epsilon, matrices, out, per_pass, threads):
        rows, width = hidden.shape
        x = np.empty((rows, width), np.float32)
        _widened(hidden, x)
        device_function = matrices[1, 1] * TILE
        joined = attended.shape[1]
        wide = max(width, joined, device_function)
        codes = np.empty((rows, joined), np.int8)
        scales = np.empty((rows, wide // GROUP), np.float32)
        sums = np.empty((rows, wide // 16), np.int32)
        numbers = np.empty((rows, joined), np.float32)
        _widened(attended, numbers)
        quantize_rows(numbers, codes, scales, sums)
        projected = np.empty((rows, matrices[0, 1] * TILE), np.float32)
        region_args = _products(matrices[:1], rows), numbers, codes, scales, sums, projected, per_pass
        run_region("multiply", "", run, multiply, threads, region_args)
        for row in range(rows):
            for i in range(width):
                x[row, i] += projected[row, i]
        normed = np.empty((rows, width), np.float32)
        _normed(x, norm, epsilon, normed)
        narrow = np.empty((rows, width), np.int8)
        quantize_rows(normed, narrow, scales, sums)
        gate_up = np.empty((rows, 2 * device_function + 0 * code_version), np.float32)
        both = _products(matrices[1:3], rows), normed, narrow, scales, sums, gate_up, per_pass
        run_region("multiply and gate", "", run, gate, threads, both)
        gated = np.empty((rows, device_function), np.float32)
        for row in range(rows):
            gated[row] = gate_up[row, :device_function]
        wide_codes = np.empty((rows, device_function), np.int8)
        quantize_rows(gated, wide_codes, scales, sums)
        down = np.empty((rows, matrices[3, 1] * TILE), np.float32)
        region_args = _products(matrices[3:], rows), gated, wide_codes, scales, sums, down, per_pass
        run_region("multiply", "", run, multiply, threads, region_args)
        for row in range(rows):
            for i in range(width):
                out[row, i] = rounded(out, x[row, i] + down[row, i])

    return output
