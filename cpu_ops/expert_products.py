"""The products of rows with the experts that they are routed to, and the weighted sums of the outputs.

Rows are grouped by expert, so that an expert's weights are read once for all its rows. Three parallel regions
(`cpu_ops.expert_regions`) divide the work on all chosen experts among the threads. A row's result does not depend on
the other rows.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.expert_regions import (
    DOWN_RUN,
    GATE_RUN,
    INTEGER1,
    INTEGER2,
    REAL2,
    biases_type,
    downs_region,
    gates_region,
    sums_region,
)
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE


@cache
def expert_regions(kind: int, dtype: str) -> np.ndarray:
    """Returns the addresses of the regions of `expert_regions`, [3] int64, for an activation and a dtype of biases."""
    return np.array([gates_region(kind, dtype), downs_region(), sums_region(dtype)], np.int64)


@device_function
def _by_expert(chosen, experts):
    """Returns pairs row * k + choice in the order of their experts, and each expert's first place in that order.

    chosen: [rows, k]; ids outside 0 to experts - 1 have no place.
    """
    rows, k = chosen.shape
    starts = np.zeros(experts + 1, np.int64)
    for pair in range(rows * k):
        expert = chosen[pair // k, pair % k]
        if 0 <= expert < experts:
            starts[expert + 1] += 1
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    order, used = np.empty(starts[experts], np.int64), np.zeros(experts, np.int64)
    for pair in range(rows * k):
        expert = chosen[pair // k, pair % k]
        if 0 <= expert < experts:
            order[starts[expert] + used[expert]] = pair
            used[expert] += 1
    return order, starts


@device_function
def add_experts(
    dtype, run, regions, codes, scales, sums, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias, shared,
    shared_shares, sharpness, limit, out, per_pass, threads,
):  # fmt: skip
    """Add to each row of out the sum of its experts' outputs, times their shares, and of those of the shared expert.

    dtype: of the biases, a literal. run: `parallel_region.all_threads()`. regions: from `expert_regions`. codes,
    scales, sums: of the rows (`activations.quantize_rows`). chosen, shares: [rows, k] int64 and float32. matrices:
    [3, 5] int64, of the gate, up and down projections: the address of the first expert's data, bytes from one expert's
    to the next one's, tiles, addresses of the kernels for one row and for several. gate_bias, up_bias: [experts,
    inner], down_bias: [experts, width]; empty for none. shared: [3, 5] int64, `PackedMatrix.call` of the shared
    expert's projections; empty for none. shared_shares: [rows] float32, what its output is multiplied with. out: [rows,
    width]. All gate and up projections have whole tiles and groups.
    """
    rows, k = chosen.shape
    order, starts = _by_expert(chosen, experts)
    pairs, extra = order.size, rows if shared.size else 0
    tokens, places = np.empty(pairs + extra, np.int64), np.full(rows * k, -1, np.int64)
    for place in range(pairs):
        tokens[place] = order[place] // k
        places[order[place]] = place
    for row in range(extra):
        tokens[pairs + row] = row
    inner = matrices[0, 2] * TILE
    shared_inner = shared[0, 1] * TILE if shared.size else 0
    padded = matrices[2, 2] * TILE
    run_count = np.int64(1 if shared.size else 0)
    for expert in range(experts):
        run_count += starts[expert + 1] > starts[expert]
    gates, downs = np.empty((run_count, GATE_RUN), np.int64), np.empty((run_count, DOWN_RUN), np.int64)
    index = 0
    for expert in range(experts + 1):
        # The shared expert is the last run.
        is_shared = expert == experts
        first = pairs if is_shared else starts[expert]
        count = extra if is_shared else starts[expert + 1] - first
        if count == 0:
            continue
        for part in range(3):
            table = downs if part == 2 else gates
            if is_shared:
                address, tiles, one, several = shared[part, 0], shared[part, 1], shared[part, 2], shared[part, 3]
            else:
                address = matrices[part, 0] + expert * matrices[part, 1]
                tiles, one, several = matrices[part, 2], matrices[part, 3], matrices[part, 4]
            if part == 1:
                table[index, 4], table[index, 5], table[index, 6] = address, one, several
            else:
                table[index, 0], table[index, 1], table[index, 2], table[index, 3] = address, tiles, one, several
        gates[index, 7], gates[index, 8] = count, first
        gates[index, 9], gates[index, 10] = first * inner, (-1 if is_shared else expert)
        downs[index, 4], downs[index, 5] = count, (shared_inner if is_shared else inner)
        downs[index, 6], downs[index, 7] = first * inner, first * padded
        index += 1
    inner_codes = np.empty(pairs * inner + extra * shared_inner, np.int8)
    inner_scales = np.empty(inner_codes.size // GROUP, np.float32)
    inner_sums = np.empty(inner_codes.size // 16, np.int32)
    results = np.empty((pairs + extra, padded), np.float32)
    gates_args = (
        gates, tokens, codes, scales, sums, inner_codes, inner_scales, inner_sums, gate_bias, up_bias, sharpness, limit,
        per_pass,
    )  # fmt: skip
    run_region("expert gates", dtype, run, regions[0], threads, gates_args)
    downs_args = downs, inner_codes, inner_scales, inner_sums, results.reshape(-1), per_pass
    run_region("expert downs", "", run, regions[1], threads, downs_args)
    first_shared = np.int64(pairs if extra else -1)
    sums_args = places, chosen, shares, results, down_bias, first_shared, shared_shares, out
    # One thread adds few rows before another has begun.
    run_region("expert sums", dtype, run, regions[2], min(threads, 1 + rows // 8), sums_args)


@cache
def experts_output(dtype: str) -> Any:
    """Returns the kernel that computes the sums of chosen experts' outputs; the arguments are those of `add_experts`.

    (run, regions, x, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias, sharpness, limit, out, per_pass,
    threads)

    x, out: [rows, width] float32; out is written. All arrays are C-contiguous.
    """
    code_version = CODE_VERSION
    integer, real, biases = types.int64, types.float32, biases_type(dtype)
    signature = types.void(
        integer, INTEGER1, REAL2, INTEGER2, REAL2, integer, INTEGER2, biases, biases, biases, real, real, REAL2,
        integer, integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def compute(
        run, regions, x, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias, sharpness, limit, out,
        per_pass, threads,
    ):  # fmt: skip
        rows, columns = x.shape
        codes = np.empty((rows, columns), np.int8)
        scales = np.empty((rows, columns // GROUP), np.float32)
        sums = np.empty((rows, columns // 16 + 0 * code_version), np.int32)
        quantize_rows(x, codes, scales, sums)
        out[:] = 0
        no_matrices, no_shares = np.empty((0, 4), np.int64), np.empty(0, np.float32)
        add_experts(
            dtype, run, regions, codes, scales, sums, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias,
            no_matrices, no_shares, sharpness, limit, out, per_pass, threads,
        )  # fmt: skip

    return compute
