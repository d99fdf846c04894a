"""The products of a few rows with the experts that they are routed to, and the weighted sums of the outputs.

Rows are grouped by expert, so that an expert's weights are read once for all its rows. Each of the two parallel
regions (gate and up projections with the activation between them, then down projections) divides all tiles of all
chosen experts among the threads. A row's result does not depend on the other rows.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gates import gated
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.quantized_linear import multiply_tiles
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

REAL1, REAL2 = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
INTEGER2 = types.Array(types.int64, 2, "C")
CODES2, SUMS2 = types.Array(types.int8, 2, "C"), types.Array(types.int32, 2, "C")
_RUN = 13


def biases_type(dtype: str) -> Any:
    """The type of biases [experts, outputs], of dtype `dtype`, a key of `NUMBERS`; rows and columns may be strided."""
    return types.Array(NUMBERS[dtype], 2, "A")


@region_arguments("expert runs")
def _expert_runs(dtype: str) -> tuple[Any, ...]:
    """(runs, codes, scales, sums, out, gate_bias, up_bias, sharpness, limit, per_pass), the arrays but `runs` and the
    biases flat. runs has, for each run of rows with one matrix or with two of equal tiles: address of the weights,
    tiles, addresses of the kernels for one row and for several; the same three addresses of the second matrix, or 0;
    rows, columns, first code, first number of out, numbers of a row of out, and the row of the biases, or -1."""
    real = types.float32
    codes, sums = types.Array(types.int8, 1, "C"), types.Array(types.int32, 1, "C")
    biases = biases_type(dtype)
    return INTEGER2, codes, REAL1, sums, REAL1, biases, biases, real, real, types.int64


@cache
def expert_region(kind: int, dtype: str) -> int:
    """Returns the address of the region "expert runs", which computes each thread's share of all runs' tiles.

    Runs of two matrices write activation(first + gate_bias) * (second + up_bias) over the first one's outputs. kind: of
    the activation (`cpu_ops.gates`); one region per kind, as in `fused_decode_layer.gate_region`.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def compute(thread, threads, arguments):
        runs, codes, scales, sums, out, gate_bias, up_bias, sharpness, limit, per_pass = arguments_at(
            "expert runs", dtype, arguments
        )
        total = np.int64(0)
        for run in range(runs.shape[0]):
            total += runs[run, 1]
        start, stop, before = total * thread // threads, total * (thread + 1) // threads, np.int64(0)
        for run in range(runs.shape[0]):
            weights, tiles, one, several, up, up_one, up_several, rows, columns, code, place, width, expert = runs[run]
            first, end = max(start - before, np.int64(0)), min(stop - before, tiles)
            before += tiles
            if first < end:
                groups, halves = columns // GROUP, columns // 16
                own_codes = codes[code : code + rows * columns].reshape(rows, columns)
                scale, total_at = code // GROUP, code // 16
                own_scales = scales[scale : scale + rows * groups].reshape(rows, groups)
                own_sums = sums[total_at : total_at + rows * halves].reshape(rows, halves)
                own_out = out[place : place + rows * width].reshape(rows, width)
                multiply_tiles(weights, one, several, per_pass, own_codes, own_scales, own_sums, own_out, 0, first, end)
                if up:
                    second = tiles * TILE
                    multiply_tiles(
                        up, up_one, up_several, per_pass, own_codes, own_scales, own_sums, own_out, second, first, end
                    )
                    for row in range(rows):
                        if expert >= 0 and gate_bias.size:
                            for i in range(first * TILE, end * TILE):
                                own_out[row, i] += number(gate_bias[expert, i])
                                own_out[row, second + i] += number(up_bias[expert, i])
                        gates = own_out[row, first * TILE : end * TILE]
                        ups = own_out[row, second + first * TILE : second + end * TILE]
                        for i in range(gates.size):
                            gates[i] = gated(gates[i], ups[i], kind, sharpness, limit)
        return np.int64(0 * code_version)

    return address_of(compute)


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
    dtype, run, region, codes, scales, sums, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias, shared,
    shared_shares, sharpness, limit, out, per_pass, threads,
):  # fmt: skip
    """Add to each row of out the sum of its experts' outputs, times their shares, and of those of the shared expert.

    dtype: of the biases, a literal. run: `parallel_region.all_threads()`. region: from `expert_region`. codes, scales,
    sums: of the rows (`activations.quantize_rows`). chosen, shares: [rows, k] int64 and float32. matrices: [3, 5]
    int64, of the gate, up and down projections: the address of the first expert's data, bytes from one expert's to the
    next one's, tiles, addresses of the kernels for one row and for several. gate_bias, up_bias: [experts, inner],
    down_bias: [experts, width]; empty for none. shared: [3, 4] int64, `PackedMatrix.call` of the shared expert's
    projections; empty for none. shared_shares: [rows] float32, what its output is multiplied with. out: [rows, width].
    All gate and up projections have whole tiles and groups.
    """
    rows, columns = codes.shape
    k, width = chosen.shape[1], out.shape[1]
    order, starts = _by_expert(chosen, experts)
    pairs, extra = order.size, rows if shared.size else 0
    inner = matrices[0, 2] * TILE
    shared_inner = shared[0, 1] * TILE if shared.size else 0
    padded = matrices[2, 2] * TILE
    run_count = np.int64(1 if shared.size else 0)
    for expert in range(experts):
        run_count += starts[expert + 1] > starts[expert]
    all_codes, all_scales, all_sums = codes.reshape(-1), scales.reshape(-1), sums.reshape(-1)
    if rows > 1:
        groups, halves = columns // GROUP, columns // 16
        gathered = np.empty((pairs + extra, columns), np.int8)
        gathered_scales = np.empty((pairs + extra, groups), np.float32)
        gathered_sums = np.empty((pairs + extra, halves), np.int32)
        for place in range(pairs + extra):
            row = order[place] // k if place < pairs else place - pairs
            gathered[place] = codes[row]
            gathered_scales[place] = scales[row]
            gathered_sums[place] = sums[row]
        all_codes, all_scales, all_sums = gathered.reshape(-1), gathered_scales.reshape(-1), gathered_sums.reshape(-1)
    gate_up = np.empty(2 * (pairs * inner + extra * shared_inner), np.float32)
    down_codes = np.empty(pairs * inner + extra * shared_inner, np.int8)
    down_scales = np.empty(down_codes.size // GROUP, np.float32)
    down_sums = np.empty(down_codes.size // 16, np.int32)
    down = np.empty((pairs + extra) * padded, np.float32)
    ups, downs = np.zeros((run_count, _RUN), np.int64), np.zeros((run_count, _RUN), np.int64)
    index = 0
    for expert in range(experts + 1):
        # The shared expert is the last run.
        is_shared = expert == experts
        first = pairs if is_shared else starts[expert]
        count = extra if is_shared else starts[expert + 1] - first
        if count == 0:
            continue
        own = shared_inner if is_shared else inner
        for part in range(3):
            table = downs if part == 2 else ups
            if is_shared:
                address, tiles, one, several = shared[part, 0], shared[part, 1], shared[part, 2], shared[part, 3]
            else:
                address = matrices[part, 0] + expert * matrices[part, 1]
                tiles, one, several = matrices[part, 2], matrices[part, 3], matrices[part, 4]
            if part == 1:
                table[index, 4], table[index, 5], table[index, 6] = address, one, several
            else:
                table[index, 0], table[index, 1], table[index, 2], table[index, 3] = address, tiles, one, several
        ups[index, 7], downs[index, 7] = count, count
        ups[index, 8], downs[index, 8] = columns, own
        ups[index, 9], downs[index, 9] = (first * columns if rows > 1 else 0), first * inner
        ups[index, 10], downs[index, 10] = 2 * first * inner, first * padded
        ups[index, 11], downs[index, 11] = 2 * own, padded
        ups[index, 12], downs[index, 12] = (-1 if is_shared else expert), -1
        index += 1
    region_args = ups, all_codes, all_scales, all_sums, gate_up, gate_bias, up_bias, sharpness, limit, per_pass
    run_region("expert runs", dtype, run, region, threads, region_args)
    for index in range(run_count):
        own = downs[index, 8]
        for row in range(downs[index, 7]):
            at, place = downs[index, 9] + row * own, ups[index, 10] + 2 * row * own
            quantize_rows(
                gate_up[place : place + own].reshape(1, own), down_codes[at : at + own].reshape(1, own),
                down_scales[at // GROUP : (at + own) // GROUP].reshape(1, own // GROUP),
                down_sums[at // 16 : (at + own) // 16].reshape(1, own // 16),
            )  # fmt: skip
    region_args = downs, down_codes, down_scales, down_sums, down, gate_bias, up_bias, sharpness, limit, per_pass
    run_region("expert runs", dtype, run, region, threads, region_args)
    places = np.full(rows * k, -1, np.int64)
    for place in range(pairs):
        places[order[place]] = place
    for row in range(rows):
        target = out[row]
        for choice in range(k):
            place, share = places[row * k + choice], shares[row, choice]
            if place >= 0:
                result = down[place * padded : place * padded + width]
                for i in range(width):
                    target[i] += share * result[i]
                if down_bias.size:
                    bias = down_bias[chosen[row, choice]]
                    for i in range(width):
                        target[i] += share * number(bias[i])
        if extra:
            result, share = down[(pairs + row) * padded : (pairs + row) * padded + width], shared_shares[row]
            for i in range(width):
                target[i] += share * result[i]


@cache
def experts_output(dtype: str) -> Any:
    """Returns the kernel that computes the sums of chosen experts' outputs; the arguments are those of `add_experts`.

    (run, region, x, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias, sharpness, limit, out, per_pass,
    threads)

    x, out: [rows, width] float32; out is written. All arrays are C-contiguous.
    """
    code_version = CODE_VERSION
    integer, real, biases = types.int64, types.float32, biases_type(dtype)
    signature = types.void(
        integer, integer, REAL2, INTEGER2, REAL2, integer, INTEGER2, biases, biases, biases, real, real, REAL2, integer,
        integer,
    )  # fmt: skip

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def compute(
        run, region, x, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias, sharpness, limit, out,
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
            dtype, run, region, codes, scales, sums, chosen, shares, experts, matrices, gate_bias, up_bias, down_bias,
            no_matrices, no_shares, sharpness, limit, out, per_pass, threads,
        )  # fmt: skip

    return compute
