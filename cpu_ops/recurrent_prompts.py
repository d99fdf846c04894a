"""A prompt's gated delta net, between its projections: convolution, delta rule, gated norm.

Tokens pass in blocks that stay in a core's cache. Within a block the rule runs token by token, for one row of a head's
transposed state after the other: such a row depends on no other, and stays in the L1 cache.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.gates import sigmoid, softplus
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.recurrent_steps import TINY

_REAL1, _REAL2, _REAL3, _STATES = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3, 4))
_REASSOCIATED = {"contract", "nsz", "reassoc"}
#: Tokens of a block: queries and keys of a head take 32 KB at 128 numbers.
_BLOCK = 32


@region_arguments("prompt convolution")
def _convolution(variant: str) -> tuple[Any, ...]:
    """(inputs, column, history, weight, bias, first, out): inputs [tokens, columns], whose channels begin at `column`,
    and history [1, channels, taps] of the variant's first dtype, weight [taps, channels] and bias [channels] float32,
    of length 0 for none, first: the first token; out: [tokens from there, channels] of the second dtype, written."""
    numbers, results = (NUMBERS[each] for each in variant.split())
    return (
        types.Array(numbers, 2, "C"), types.int64, types.Array(numbers, 3, "C"), _REAL2, _REAL1, types.int64,
        types.Array(results, 2, "C"),
    )  # fmt: skip


@cache
def convolution_region(variant: str) -> int:
    """Returns the address of the region "prompt convolution", in which each thread has some channels: a causal
    convolution per channel, then SiLU.

    variant: dtypes of the inputs and of the results, two keys of `bfloat16_bits.NUMBERS` with a space between them.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath=_REASSOCIATED)
    def convolve(thread, threads, arguments):
        inputs, column, history, weight, bias, first, out = arguments_at("prompt convolution", variant, arguments)
        taps, channels = weight.shape
        start, end = channels * thread // threads, channels * (thread + 1) // threads
        sums = np.empty(end - start, np.float32)
        for token in range(out.shape[0]):
            for i in range(sums.size):
                sums[i] = bias[start + i] if bias.size else 0
            for tap in range(taps):
                source = first + token + tap + 1 - taps
                factors = weight[tap, start:end]
                if source >= 0:
                    row = inputs[source, column + start : column + end]
                    for i in range(sums.size):
                        sums[i] += number(row[i]) * factors[i]
                else:
                    for i in range(sums.size):
                        sums[i] += number(history[0, start + i, taps + source]) * factors[i]
            target = out[token, start:end]
            for i in range(sums.size):
                target[i] = rounded(out, sums[i] * sigmoid(sums[i]))
        return np.int64(0 * code_version)

    return address_of(convolve)


@region_arguments("prompt delta rule")
def _rule(dtype: str) -> tuple[Any, ...]:
    """(inputs, first, qkv, decay, time_bias, states, norm, epsilon, key_heads, mixed): inputs and first as of "prompt
    convolution", whose result is qkv; states [heads, v_dim, k_dim] float32, updated; mixed [tokens, heads * v_dim] of
    `dtype`, written; others as of `delta_prompt`."""
    numbers = types.Array(NUMBERS[dtype], 2, "C")
    real, integer = types.float32, types.int64
    return numbers, integer, _REAL2, _REAL1, _REAL1, _REAL3, _REAL1, real, integer, numbers


@cache
def prompt_rule_region(dtype: str) -> int:
    """Returns the address of the region "prompt delta rule", in which each thread has some heads.

    The gated delta rule (arXiv:2412.06464, equation 10), then the norm of each head times the activation of z.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath=_REASSOCIATED)
    def compute(thread, threads, arguments):
        inputs, first, qkv, decay, time_bias, states, norm, epsilon, key_heads, mixed = arguments_at(
            "prompt delta rule", dtype, arguments
        )
        tokens, channels = qkv.shape
        heads, v_dim, k_dim = states.shape
        first_v, inner = 2 * key_heads * k_dim, heads * v_dim
        queries, keys = np.empty((tokens, k_dim), np.float32), np.empty((tokens, k_dim), np.float32)
        products, kept, written = (np.empty(tokens, np.float32), np.empty(tokens, np.float32),
                                   np.empty(tokens, np.float32))  # fmt: skip
        outputs = np.empty((tokens, v_dim), np.float32)
        for head in range(heads * thread // threads, heads * (thread + 1) // threads):
            key_head = head * key_heads // heads
            for token in range(tokens):
                q = qkv[token, key_head * k_dim : (key_head + 1) * k_dim]
                k = qkv[token, (key_heads + key_head) * k_dim : (key_heads + key_head + 1) * k_dim]
                square_q, square_k, product = np.float32(0), np.float32(0), np.float32(0)
                for i in range(k_dim):
                    square_q += q[i] * q[i]
                    square_k += k[i] * k[i]
                    product += q[i] * k[i]
                scale_q = np.float32(1) / np.sqrt((square_q + TINY) * np.float32(k_dim))
                scale_k = np.float32(1) / np.sqrt(square_k + TINY)
                products[token] = product * scale_q * scale_k
                for i in range(k_dim):
                    queries[token, i] = q[i] * scale_q
                    keys[token, i] = k[i] * scale_k
                written[token] = sigmoid(number(inputs[first + token, channels + inner + head]))
                time = number(inputs[first + token, channels + inner + heads + head]) + time_bias[head]
                kept[token] = np.exp(decay[head] * softplus(time))
            for j in range(v_dim):
                row = states[head, j]
                for token in range(tokens):
                    remembered, total = np.float32(0), np.float32(0)
                    key, query = keys[token], queries[token]
                    for i in range(k_dim):
                        remembered += row[i] * key[i]
                        total += row[i] * query[i]
                    share = kept[token]
                    change = (qkv[token, first_v + head * v_dim + j] - share * remembered) * written[token]
                    for i in range(k_dim):
                        row[i] = row[i] * share + key[i] * change
                    outputs[token, j] = share * total + change * products[token]
            for token in range(tokens):
                square = np.float32(0)
                for j in range(v_dim):
                    square += outputs[token, j] * outputs[token, j]
                inverse = np.float32(1) / np.sqrt(square / np.float32(v_dim) + epsilon)
                for j in range(v_dim):
                    gate = number(inputs[first + token, channels + head * v_dim + j])
                    normed = outputs[token, j] * inverse * norm[j]
                    mixed[first + token, head * v_dim + j] = rounded(mixed, normed * gate * sigmoid(gate))
        return np.int64(0 * code_version)

    return address_of(compute)


@cache
def delta_prompt(dtype: str) -> Any:
    """Returns the kernel of a gated delta net (arXiv:2412.06464) for the tokens of a prompt.

    dtype: of the inputs, a key of `bfloat16_bits.NUMBERS`. All arrays are C-contiguous.

    (run, convolution, rule, inputs, history, weight, decay, time_bias, state, norm, epsilon, key_heads, mixed, threads)

    convolution: from `convolution_region`, to float32; rule: from `prompt_rule_region`. inputs: [tokens, channels +
    heads * v_dim + 2 * heads], the projections of each token: queries, keys and values (the convolution's channels), z,
    beta, time step. history: [1, channels, taps], the tokens before, zeros at the beginning. weight: [taps, channels]
    float32. decay, time_bias: [heads] float32, -exp(A_log) and the time step's bias. state: [1, heads, k_dim, v_dim]
    float32, updated. norm: [v_dim] float32. mixed: [tokens, heads * v_dim] of `dtype`, written.
    """
    code_version, to_float = CODE_VERSION, f"{dtype} float32"
    real, integer = types.float32, types.int64
    rows_type, history_type = (types.Array(NUMBERS[dtype], dimensions, "C") for dimensions in (2, 3))
    signature = types.void(
        integer, integer, integer, rows_type, history_type, _REAL2, _REAL1, _REAL1, _STATES, _REAL1, real, integer,
        rows_type, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def prompt(
        run, convolution, rule, inputs, history, weight, decay, time_bias, state, norm, epsilon, key_heads, mixed,
        threads,
    ):  # fmt: skip
        heads, k_dim, v_dim = state.shape[1:]
        tokens, channels = inputs.shape[0], weight.shape[1]
        transposed = np.empty((heads, v_dim, k_dim + 0 * code_version), np.float32)
        for head in range(heads):
            for i in range(k_dim):
                for j in range(v_dim):
                    transposed[head, j, i] = state[0, head, i, j]
        qkv, no_bias = np.empty((_BLOCK, channels), np.float32), np.empty(0, np.float32)
        for first in range(0, tokens, _BLOCK):
            own = qkv[: min(_BLOCK, tokens - first)]
            convolution_args = inputs, 0, history, weight, no_bias, first, own
            run_region("prompt convolution", to_float, run, convolution, threads, convolution_args)
            rule_args = inputs, first, own, decay, time_bias, transposed, norm, epsilon, key_heads, mixed
            run_region("prompt delta rule", dtype, run, rule, threads, rule_args)
        for head in range(heads):
            for i in range(k_dim):
                for j in range(v_dim):
                    state[0, head, i, j] = transposed[head, j, i]

    return prompt
