"""The second half of a decoder layer with a mixture of experts, one token per row, in one native call.

Output projection, residual, norm, router, choice, the chosen experts and the shared one, residual. The first half is
`fused_decode_layer.attention_inputs`, or a recurrent mixer's kernel.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.expert_products import add_experts
from hetero_kv.cpu_ops.expert_regions import INTEGER1, INTEGER2, REAL1, REAL2, biases_type
from hetero_kv.cpu_ops.fused_layer_parts import add_mixed, add_normed, normed, widened
from hetero_kv.cpu_ops.gates import sigmoid
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.routing import choose_experts
from hetero_kv.cpu_ops.weight_formats import GROUP


@cache
def mixture_output(dtype: str, router_dtype: str, biases_dtype: str) -> Any:
    """Returns the kernel that computes a layer's output: x = hidden + projection of `mixed`, x + mixture(norm(x)).

    dtype: of the hidden states, router_dtype: of the router's weights, biases_dtype: of the experts' biases, keys of
    `bfloat16_bits.NUMBERS`. All arrays but the experts' biases are C-contiguous.

    (run, multiply, route, regions, hidden, mixed, gates, matrix, bias, after_norm, norm, after_mixture_norm, epsilon,
    factor, mixture_factor, router, router_bias, correction, form, scale, k, matrices, gate_bias, up_bias, down_bias,
    shared, shared_gate, sharpness, limit, out, per_pass, threads)

    hidden, out: [rows, width], float32 or the bits of bfloat16. mixed, gates, matrix, bias, after_norm, factor: as for
    `fused_layer_parts.add_mixed`; a mixture alone has a `mixed` without columns. norm, after_mixture_norm, epsilon: as
    for `fused_decode_layer.attention_output`. mixture_factor: of the mixture's output.
    route: from `routing.router_region`. router: [experts, width], and router_bias: [experts] float32, of length 0 for
    none. correction, form, scale: as for `routing.choose_experts`. k: experts of a row. regions, matrices, biases,
    shared, sharpness, limit: as for `expert_products.add_experts`. shared_gate: [width] float32: the shared expert's
    output is multiplied with the sigmoid of its product with the row; length 0 for none.
    """
    code_version = CODE_VERSION
    real, integer, numbers_type = types.float32, types.int64, types.Array(NUMBERS[dtype], 2, "C")
    router_type, biases = types.Array(NUMBERS[router_dtype], 2, "C"), biases_type(biases_dtype)
    signature = types.void(
        integer, integer, integer, INTEGER1, numbers_type, numbers_type, REAL2, INTEGER2, REAL1, REAL1, REAL1, REAL1,
        real, real, real, router_type, REAL1, REAL1, INTEGER1, real, integer, INTEGER2, biases, biases,
        biases, INTEGER2, REAL1, real, real, numbers_type, integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def output(
        run, multiply, route, regions, hidden, mixed, gates, matrix, bias, after_norm, norm, after_mixture_norm,
        epsilon, factor, mixture_factor, router, router_bias, correction, form, scale, k, matrices, gate_bias, up_bias,
        down_bias, shared, shared_gate, sharpness, limit, out, per_pass, threads,
    ):  # fmt: skip
        rows, width = hidden.shape
        experts = router.shape[0]
        x, normed_x = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
        widened(hidden, x)
        if mixed.shape[1]:
            add_mixed(
                run, multiply, mixed, gates, matrix, bias, after_norm, epsilon, factor, x, rows, per_pass, threads
            )
        normed(x, norm, epsilon, normed_x)
        logits = np.empty((rows, experts), np.float32)
        run_region("router products", router_dtype, run, route, threads, (router, normed_x, logits))
        if router_bias.size:
            for row in range(rows):
                for expert in range(experts):
                    logits[row, expert] += router_bias[expert]
        chosen, shares = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
        choose_experts(logits, correction, form, scale, chosen, shares)
        shared_shares = np.ones(rows, np.float32)
        if shared_gate.size:
            for row in range(rows):
                total = np.float32(0)
                for i in range(width):
                    total += normed_x[row, i] * shared_gate[i]
                shared_shares[row] = sigmoid(total)
        codes = np.empty((rows, width), np.int8)
        scales = np.empty((rows, width // GROUP), np.float32)
        sums = np.empty((rows, width // 16 + 0 * code_version), np.int32)
        quantize_rows(normed_x, codes, scales, sums)
        mixture = np.zeros((rows, width), np.float32)
        add_experts(
            biases_dtype, run, regions, codes, scales, sums, chosen, shares, experts, matrices, gate_bias, up_bias,
            down_bias, shared, shared_shares, sharpness, limit, mixture, per_pass, threads,
        )  # fmt: skip
        add_normed(mixture, after_mixture_norm, epsilon, mixture_factor, x)
        for row in range(rows):
            for i in range(width):
                out[row, i] = rounded(out, x[row, i])

    return output
