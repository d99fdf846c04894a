"""A prompt's Mamba-2 mixer, between its projections: convolution, state-space duality, gated norm.

Tokens pass in blocks. Within a block the recurrence is a product of small matrices for each head (arXiv:2405.21060,
section 6): outputs are the decayed state times C, plus the block's own inputs, weighted by C B^T and the decay between
two tokens. One more product adds the block to the state. All decays are powers of two of differences, at most 1.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import ISAS
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2
from hetero_kv.cpu_ops.gates import softplus
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.matrix_tiles import multiply_tile
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.state_space_steps import gate_and_norm

_REAL1, _REAL2, _REAL3, _STATES = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3, 4))
_REASSOCIATED = {"contract", "nsz", "reassoc"}
#: Tokens of a block, a multiple of all tiles.
_BLOCK = 64
# Rows and vectors of columns of a tile of sums, by the number of vector registers.
_HEIGHTS, _VECTORS = {32: 8, 16: 4}, 2


@region_arguments("state-space block")
def _block(dtype: str) -> tuple[Any, ...]:
    """(inputs, first, last, xbc, decay, time_bias, skip, least, most, groups, states, transposed, out): inputs as of
    `mamba2_prompt`, first: the block's first token, last: whether no block follows; xbc [tokens, channels], the
    convolved x, B and C, in memory for whole blocks; states as of the kernel, read at token 0 and written at the last
    block; transposed [heads, state_dim, head_dim], both padded to tiles, the state in between; out [tokens, heads *
    head_dim], written; float32."""
    numbers = types.Array(NUMBERS[dtype], 2, "C")
    real, integer = types.float32, types.int64
    return (
        numbers, integer, types.boolean, _REAL2, _REAL1, _REAL1, _REAL1, real, real, integer, _STATES, _REAL3, _REAL2,
    )  # fmt: skip


@cache
def block_region(dtype: str, instructions: str) -> int:
    """Returns the address of the region "state-space block", in which each thread has some heads.

    instructions: a key of `cpu_features.ISAS`.
    """
    lanes, height = ISAS[instructions].float_lanes, _HEIGHTS[ISAS[instructions].registers]
    wide, block, vectors, code_version = _VECTORS * lanes, _BLOCK, _VECTORS, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath=_REASSOCIATED)
    def compute(thread, threads, arguments):
        (
            inputs, first, last, xbc, decay, time_bias, skip, least, most, groups, states, transposed, out
        ) = arguments_at("state-space block", dtype, arguments)  # fmt: skip
        tokens, channels = xbc.shape
        heads, head_dim, state_dim = states.shape[1:]
        state_pad, pitch = transposed.shape[1:]
        inner = heads * head_dim
        ends, shares = np.empty(tokens, np.float64), np.empty(tokens, np.float32)
        keys, alike = scratch(state_pad, block), scratch(block, block)
        weights, moved, sums = scratch(block, block), scratch(block, pitch), scratch(block, pitch)
        present = -1
        for head in range(heads * thread // threads, heads * (thread + 1) // threads):
            group = head * groups // heads
            queries_at = inner + (groups + group) * state_dim
            if group != present:
                present = group
                for token in range(tokens):
                    row = xbc[token, inner + group * state_dim : inner + (group + 1) * state_dim]
                    for i in range(state_dim):
                        keys[i, token] = row[i]
                for token in range(0, tokens, height):
                    for column in range(0, token + height, wide):
                        multiply_tile(
                            lanes, height, vectors, 0, xbc, token * channels + queries_at, channels, 1, state_dim,
                            keys, column, block, alike, token * block + column, block,
                        )  # fmt: skip
            state, own = transposed[head], states[0, head]
            if first == 0:
                for i in range(state_dim):
                    for j in range(head_dim):
                        state[i, j] = own[j, i]
            total = np.float64(0)
            for token in range(tokens):
                time = softplus(number(inputs[first + token, inner + channels + head]) + time_bias[head])
                time = min(max(time, least), most)
                total += np.float64(time) * np.float64(decay[head] * LOG2_E)
                ends[token] = total
                x = xbc[token, head * head_dim : (head + 1) * head_dim]
                for j in range(head_dim):
                    moved[token, j] = x[j] * time
            # Outputs: the state before the block, and the block's tokens up to each one.
            for token in range(0, tokens, height):
                for column in range(0, pitch, wide):
                    multiply_tile(
                        lanes, height, vectors, 0, xbc, token * channels + queries_at, channels, 1, state_dim,
                        state, column, pitch, sums, token * pitch + column, pitch,
                    )  # fmt: skip
            for token in range(tokens):
                factor, end = exp2(np.float32(ends[token])), ends[token]
                for j in range(pitch):
                    sums[token, j] *= factor
                for source in range(token + 1):
                    weights[token, source] = alike[token, source] * exp2(np.float32(end - ends[source]))
                for source in range(token + 1, token - token % height + height):
                    weights[token, source] = 0
            for token in range(0, tokens, height):
                depth = min(token + height, tokens)
                for column in range(0, pitch, wide):
                    multiply_tile(
                        lanes, height, vectors, 1, weights, token * block, block, 1, depth,
                        moved, column, pitch, sums, token * pitch + column, pitch,
                    )  # fmt: skip
            for token in range(tokens):
                for j in range(head_dim):
                    at = head * head_dim + j
                    out[token, at] = sums[token, j] + skip[head] * xbc[token, at]
            # The state behind the block.
            for token in range(tokens):
                shares[token] = exp2(np.float32(total - ends[token]))
            for token in range(tokens):
                for j in range(pitch):
                    moved[token, j] *= shares[token]
            factor = exp2(np.float32(total))
            for i in range(state_dim):
                for j in range(pitch):
                    state[i, j] *= factor
            for i in range(0, state_dim, height):
                for column in range(0, pitch, wide):
                    multiply_tile(
                        lanes, height, vectors, 1, keys, i * block, block, 1, tokens,
                        moved, column, pitch, state, i * pitch + column, pitch,
                    )  # fmt: skip
            if last:
                for i in range(state_dim):
                    for j in range(head_dim):
                        own[j, i] = state[i, j]
        return np.int64(0 * code_version)

    return address_of(compute)


@region_arguments("prompt gated norm")
def _gated_norm(dtype: str) -> tuple[Any, ...]:
    """(values, inputs, first, norm, epsilon, groups, gates_last, mixed): values [tokens, inner] float32, overwritten;
    inputs, first and mixed as of `mamba2_prompt` and its blocks, others as of `gate_and_norm`."""
    numbers = types.Array(NUMBERS[dtype], 2, "C")
    real, integer = types.float32, types.int64
    return _REAL2, numbers, integer, _REAL1, real, integer, integer, numbers


@cache
def gated_norm_region(dtype: str) -> int:
    """Returns the address of the region "prompt gated norm", in which each thread has some tokens."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def compute(thread, threads, arguments):
        values, inputs, first, norm, epsilon, groups, gates_last, mixed = arguments_at(
            "prompt gated norm", dtype, arguments
        )
        tokens, inner = values.shape
        for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
            gates = inputs[first + token, :inner]
            gate_and_norm(values[token], gates, norm, epsilon, groups, gates_last, mixed[first + token])
        return np.int64(0 * code_version)

    return address_of(compute)


@cache
def mamba2_prompt(dtype: str, instructions: str) -> Any:
    """Returns the kernel of a Mamba-2 mixer (arXiv:2405.21060) for the tokens of a prompt.

    dtype: of the inputs, a key of `bfloat16_bits.NUMBERS`. instructions: a key of `cpu_features.ISAS`, as of
    `block_region`. All arrays are C-contiguous.

    (run, convolution, block, norms, inputs, history, weight, weight_bias, decay, time_bias, skip, least, most, state,
    groups, norm, epsilon, norm_groups, gates_last, mixed, threads)

    convolution: from `recurrent_prompts.convolution_region`, to float32; block: from `block_region`; norms: from
    `gated_norm_region`. inputs: [tokens, inner + channels + heads], the projection of each token: gates, the channels
    x, B and C, time steps. history: [1, channels, taps], the tokens before, zeros at the beginning. weight: [taps,
    channels], weight_bias: [channels] float32, of length 0 for none. decay, time_bias, skip: [heads] float32,
    -exp(A_log), the time step's bias and D. least, most: limits of the time step. state: [1, heads, head_dim,
    state_dim] float32, updated. groups: of heads that share B and C. norm, epsilon, norm_groups, gates_last: as for
    `gate_and_norm`. mixed: [tokens, inner] of `dtype`, written.
    """
    lanes, height = ISAS[instructions].float_lanes, _HEIGHTS[ISAS[instructions].registers]
    wide, block_size, code_version, to_float = _VECTORS * lanes, _BLOCK, CODE_VERSION, f"{dtype} float32"
    real, integer = types.float32, types.int64
    rows_type, history_type = (types.Array(NUMBERS[dtype], dimensions, "C") for dimensions in (2, 3))
    signature = types.void(
        integer, integer, integer, integer, rows_type, history_type, _REAL2, _REAL1, _REAL1, _REAL1, _REAL1, real, real,
        _STATES, integer, _REAL1, real, integer, integer, rows_type, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def prompt(
        run, convolution, block, norms, inputs, history, weight, weight_bias, decay, time_bias, skip, least, most,
        state, groups, norm, epsilon, norm_groups, gates_last, mixed, threads,
    ):  # fmt: skip
        heads, head_dim, state_dim = state.shape[1:]
        tokens, channels, inner = inputs.shape[0], weight.shape[1], mixed.shape[1]
        state_pad, pitch = -(-state_dim // height) * height, -(-head_dim // wide) * wide
        transposed = scratch(heads * state_pad, pitch).reshape(heads, state_pad, pitch + 0 * code_version)
        xbc, values = scratch(block_size, channels), scratch(block_size, inner)
        for first in range(0, tokens, block_size):
            count = min(block_size, tokens - first)
            own, out = xbc[:count], values[:count]
            convolution_args = inputs, inner, history, weight, weight_bias, first, own
            run_region("prompt convolution", to_float, run, convolution, threads, convolution_args)
            block_args = (
                inputs, first, first + count == tokens, own, decay, time_bias, skip, least, most, groups, state,
                transposed, out,
            )  # fmt: skip
            run_region("state-space block", dtype, run, block, threads, block_args)
            norm_args = out, inputs, first, norm, epsilon, norm_groups, gates_last, mixed
            run_region("prompt gated norm", dtype, run, norms, threads, norm_args)

    return prompt
