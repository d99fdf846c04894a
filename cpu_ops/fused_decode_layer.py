"""A decoder layer's decode step without attention: norms, projections, rotation, MLP and residuals, one token per row.

`attention_inputs` is the part before attention; `attention_output`, or `cpu_ops.fused_mixture` for a mixture of
experts, the part after it. Each is one call, with as few parallel regions as its products allow, and quantizes an input
of several products once. The layers have Llama's form: RMSNorm, projections with or without bias, optional norms of
queries and keys, rotation of half against half, a gated MLP. Queries may have gates, a part of a head or all of it may
not be rotated, keys, gates and the outputs of attention and MLP may be multiplied, and these outputs normalised. An MLP
may have no gates. A layer may be attention or a recurrent mixer alone (`mixer_output`), or an MLP alone.
`cpu_ops.quantized_linear` computes the products; everything between them is float32.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_group
from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.fused_layer_parts import add_mixed, add_normed, coded, normed, products_table, widened
from hetero_kv.cpu_ops.gates import SQUARED_RELU, activated, sigmoid
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.quantized_linear import multiply_tiles
from hetero_kv.cpu_ops.tile_products import WORDS, gate_by_tiles, laid_out
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

_REASSOCIATED = {"contract", "nsz", "reassoc"}


@device_function(fastmath=_REASSOCIATED)
def _normed_heads(x, first, heads, stride, weight, epsilon):
    """Apply RMSNorm to the first numbers of each of `heads` parts of x[:, first:], `stride` apart, in place."""
    dim = weight.size
    for row in range(x.shape[0]):
        for head in range(heads):
            at = first + head * stride
            total = np.float32(0)
            for i in range(dim):
                total += x[row, at + i] * x[row, at + i]
            factor = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
            for i in range(dim):
                x[row, at + i] = x[row, at + i] * factor * weight[i]


@device_function
def _rotated(x, first, stride, cos, sin, out):
    """Write x * cos + rotate_half(x) * sin of each head of x[:, first:] to out [rows, heads, 1, dim].

    stride: from one head to the next. cos, sin: [rows, rotated]; the rest of a head remains.
    """
    rotated = cos.shape[1]
    half = rotated // 2
    for row in range(x.shape[0]):
        for head in range(out.shape[1]):
            at = first + head * stride
            for i in range(rotated, out.shape[3]):
                out[row, head, 0, i] = rounded(out, x[row, at + i])
            for i in range(half):
                low, high = x[row, at + i], x[row, at + half + i]
                transposed = low * number(cos[row, i]) - high * number(sin[row, i])
                out[row, head, 0, i] = rounded(out, transposed)
                transposed = high * number(cos[row, half + i]) + low * number(sin[row, half + i])
                out[row, head, 0, half + i] = rounded(out, transposed)


@region_arguments("multiply and gate")
def _gated_products(_: str) -> tuple[Any, ...]:
    """(table, codes, scales, sums, words, rows, factor, out, gated_codes, gated_scales, gated_sums, gated_words,
    per_pass): as for the region "multiply"; the table has the gate projection, then the up projection. rows: of
    `words`. factor: of the gates. out: has the rows of `codes`. The gated products are written as the next product
    takes them. Without gates (`SQUARED_RELU`) the table has the up projection alone, and there are no words."""
    real2, table = types.Array(types.float32, 2, "C"), types.Array(types.int64, 2, "C")
    quantized = types.Array(types.int8, 2, "C"), real2, types.Array(types.int32, 2, "C")
    return table, *quantized, WORDS, types.int64, types.float32, real2, *quantized, WORDS, types.int64


@cache
def gate_region(kind: int) -> int:
    """Returns the address of the region "multiply and gate", which quantizes activation(factor * gate) * up.

    kind: of the activation (`cpu_ops.gates`); one region per kind, as a loop that branches on it is not vectorised.
    Tiles are in pairs, so that a thread has whole groups to quantize.
    """
    code_version = CODE_VERSION
    pair, has_gate = GROUP // TILE, kind != SQUARED_RELU

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def gate(thread, threads, arguments):
        (
            table, codes, scales, sums, words, rows, factor, out, gated_codes, gated_scales, gated_sums, gated_words,
            per_pass,
        ) = arguments_at("multiply and gate", "", arguments)  # fmt: skip
        # Both projections have as many tiles.
        groups, up = table[0, 1] // pair, table[table.shape[0] - 1, 5]
        first, end = groups * thread // threads, groups * (thread + 1) // threads
        for index in range(table.shape[0]):
            weights, one, several = table[index, 0], table[index, 2], table[index, 3]
            multiply_tiles(
                weights, one, several, per_pass, codes, scales, sums, out, table[index, 5], first * pair, end * pair
            )
        if has_gate and words.size:
            gate_by_tiles(kind, factor, table, codes.shape[1], words, rows, gated_words, first, end)
        start, stop = first * GROUP, end * GROUP
        for row in range(out.shape[0]):
            own, other = out[row, start:stop], out[row, up + start : up + stop]
            for i in range(own.size):
                if has_gate:
                    own[i] = activated(own[i] * factor, kind) * other[i]
                else:
                    own[i] = activated(own[i], kind)
            for group in range(first, end):
                target = row * groups + group
                quantize_group(
                    out, row * out.shape[1] + group * GROUP, gated_codes, target * GROUP, gated_scales, target,
                    gated_sums, 2 * target,
                )  # fmt: skip
        return np.int64(0 * code_version)

    return address_of(gate)


@cache
def attention_inputs(dtype: str, rotation_dtype: str) -> Any:
    """Returns the kernel that computes q, k and v of one token per row.

    dtype: of the hidden states, rotation_dtype: of cos and sin, both keys of `bfloat16_bits.NUMBERS`. All
    arrays are C-contiguous.

    (run, multiply, hidden, norm, epsilon, projections, bias, key_factor, query_norm, key_norm, head_epsilon, cos, sin,
    q, k, v, gates, few, per_pass, threads)

    run: `parallel_region.all_threads()`. multiply: `quantized_linear.multiply_region()`.

    hidden: [rows, width], float32 or the bits of bfloat16. q: [rows, heads, 1, dim], k: [rows, kv_heads, 1, dim] and v:
    [rows, kv_heads, 1, dim], of the same type, written. norm: [width] float32, with its epsilon. projections: [3, 5]
    int64, `PackedMatrix.call` of q, k and v. bias: [all outputs] float32; length 0 for none. key_factor: of the keys
    before their norm. query_norm, key_norm: [dim] float32, or of all heads together; length 0 for none. cos, sin:
    [rows, rotated], of the tokens' positions.
    gates: [rows, heads * dim] float32, written: sigmoids of the numbers that follow each head's query in the outputs;
    length 0 for queries without gates. few: as for `fused_layer_parts.coded`. per_pass: `weight_dots.rows_per_pass()`.
    """
    code_version = CODE_VERSION
    real, integer, weights = types.float32, types.int64, types.Array(types.float32, 1, "C")
    hidden_type, heads_type = (types.Array(NUMBERS[dtype], dimensions, "C") for dimensions in (2, 4))
    rotation, table = types.Array(NUMBERS[rotation_dtype], 2, "C"), types.Array(integer, 2, "C")
    signature = types.void(
        integer, integer, hidden_type, weights, real, table, weights, real, weights, weights, real, rotation, rotation,
        heads_type, heads_type, heads_type, types.Array(real, 2, "C"), integer, integer, integer,
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
        key_factor,
        query_norm,
        key_norm,
        head_epsilon,
        cos,
        sin,
        q,
        k,
        v,
        gates,
        few,
        per_pass,
        threads,
    ):
        rows, width = hidden.shape
        dim = q.shape[3]
        x = np.empty((rows, width), np.float32)
        widened(hidden, x)
        normed(x, norm, epsilon, x)
        codes, scales, sums, words = coded(x, few)
        first_k = projections[0, 1] * TILE
        first_v = first_k + projections[1, 1] * TILE
        out = np.empty((rows, first_v + projections[2, 1] * TILE + 0 * code_version), np.float32)
        region_args = products_table(projections, few), x, codes, scales, sums, out, per_pass, words
        run_region("multiply", "", run, multiply, threads, region_args)
        heads, kv_heads = q.shape[1], k.shape[1]
        stride = 2 * dim if gates.size else dim
        queries, keys = heads * stride, kv_heads * dim
        if bias.size:
            for row in range(rows):
                for i in range(queries):
                    out[row, i] += bias[i]
                for i in range(keys):
                    out[row, first_k + i] += bias[queries + i]
                    out[row, first_v + i] += bias[queries + keys + i]
        if key_factor != np.float32(1):
            for row in range(rows):
                for i in range(keys):
                    out[row, first_k + i] *= key_factor
        if query_norm.size:
            together = query_norm.size // dim
            _normed_heads(out, 0, heads // together, stride * together, query_norm, head_epsilon)
            together = key_norm.size // dim
            _normed_heads(out, first_k, kv_heads // together, dim * together, key_norm, head_epsilon)
        _rotated(out, 0, stride, cos, sin, q)
        _rotated(out, first_k, dim, cos, sin, k)
        if gates.size:
            for row in range(rows):
                for head in range(heads):
                    for i in range(dim):
                        gates[row, head * dim + i] = sigmoid(out[row, head * stride + dim + i])
        for row in range(rows):
            for head in range(kv_heads):
                for i in range(dim):
                    v[row, head, 0, i] = rounded(v, out[row, first_v + head * dim + i])

    return inputs


@cache
def attention_output(dtype: str) -> Any:
    """Returns the kernel that computes a layer's output: x = hidden + projection of `mixed`, then x + MLP(norm(x)).

    dtype: of the hidden states, a key of `bfloat16_bits.NUMBERS`. All arrays are C-contiguous.

    (run, multiply, gate, hidden, mixed, gates, bias, after_norm, norm, after_mlp_norm, epsilon, factor, gate_factor,
    mlp_factor, matrices, out, few, per_pass, threads)

    hidden, out: [rows, width], float32 or the bits of bfloat16. mixed, gates, bias, after_norm, factor: as for
    `fused_layer_parts.add_mixed`; an MLP alone has a `mixed` without columns. norm: [width] float32, of the MLP's
    input, and after_mlp_norm of its output, of length 0 for none; `epsilon` is that of all three norms. gate_factor,
    mlp_factor: of the gates before their activation, and of the MLP's output. matrices: [4, 5] int64,
    `PackedMatrix.call` of the output, gate, up and down projections, [3, 5] without gates; the last tiles of gate and
    up are full. gate: from `gate_region`, for the MLP's activation. few: as for `fused_layer_parts.coded`.
    """
    code_version = CODE_VERSION
    real, integer, numbers_type = types.float32, types.int64, types.Array(NUMBERS[dtype], 2, "C")
    real1, real2 = types.Array(real, 1, "C"), types.Array(real, 2, "C")
    signature = types.void(
        integer, integer, integer, numbers_type, numbers_type, real2, real1, real1, real1, real1, real, real, real,
        real, types.Array(integer, 2, "C"), numbers_type, integer, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def output(
        run, multiply, gate, hidden, mixed, gates, bias, after_norm, norm, after_mlp_norm, epsilon, factor,
        gate_factor, mlp_factor, matrices, out, few, per_pass, threads,
    ):  # fmt: skip
        rows, width = hidden.shape
        x = np.empty((rows, width), np.float32)
        widened(hidden, x)
        if mixed.shape[1]:
            add_mixed(
                run, multiply, mixed, gates, matrices[:1], bias, after_norm, epsilon, factor, x, few, per_pass, threads
            )
        inner = matrices[1, 1] * TILE
        normed_x = np.empty((rows, width), np.float32)
        normed(x, norm, epsilon, normed_x)
        codes, scales, sums, words = coded(normed_x, few)
        last = len(matrices) - 1
        gate_up = np.empty((few, (last - 1) * inner + 0 * code_version), np.float32)
        gated_codes = np.empty((few, inner), np.int8)
        gated_scales = np.empty((few, inner // GROUP), np.float32)
        gated_sums = np.empty((few, inner // 16), np.int32)
        gated_words = laid_out(rows - few, inner)
        gate_args = (
            products_table(matrices[1:last], few), codes, scales, sums, words, rows - few, gate_factor, gate_up,
            gated_codes, gated_scales, gated_sums, gated_words, per_pass,
        )  # fmt: skip
        run_region("multiply and gate", "", run, gate, threads, gate_args)
        down = np.empty((rows, matrices[last, 1] * TILE), np.float32)
        # Only numbers of 16 bits would be multiplied with the numbers themselves.
        region_args = (
            products_table(matrices[last:], few), gate_up, gated_codes, gated_scales, gated_sums, down, per_pass,
            gated_words,
        )  # fmt: skip
        run_region("multiply", "", run, multiply, threads, region_args)
        add_normed(down, after_mlp_norm, epsilon, mlp_factor, x)
        for row in range(rows):
            for i in range(width):
                out[row, i] = rounded(out, x[row, i])

    return output


@cache
def mixer_output(dtype: str) -> Any:
    """Returns the kernel that adds a token mixer's output: out = hidden + projection of `mixed`.

    It is the second half of a layer without MLP, or the first part of that of a layer with two mixers.

    dtype: of the hidden states, a key of `bfloat16_bits.NUMBERS`. All arrays are C-contiguous.

    (run, multiply, hidden, mixed, gates, bias, after_norm, epsilon, factor, matrix, out, per_pass, threads)

    hidden, out: [rows, width], float32 or the bits of bfloat16; other arguments: as for `fused_layer_parts.add_mixed`.
    """
    code_version = CODE_VERSION
    real, integer, numbers_type = types.float32, types.int64, types.Array(NUMBERS[dtype], 2, "C")
    real1 = types.Array(real, 1, "C")
    signature = types.void(
        integer, integer, numbers_type, numbers_type, types.Array(real, 2, "C"), real1, real1, real, real,
        types.Array(integer, 2, "C"), numbers_type, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def output(run, multiply, hidden, mixed, gates, bias, after_norm, epsilon, factor, matrix, out, per_pass, threads):
        rows, width = hidden.shape
        x = np.empty((rows, width + 0 * code_version), np.float32)
        widened(hidden, x)
        add_mixed(run, multiply, mixed, gates, matrix, bias, after_norm, epsilon, factor, x, rows, per_pass, threads)
        for row in range(rows):
            for i in range(width):
                out[row, i] = rounded(out, x[row, i])

    return output
