"""The parallel parts of a mixture's experts: gate and up projections, down projections, the sums of the outputs.

Experts without gates (`SQUARED_RELU`) have the up projection in place of the gate's, and no other.

A run is an expert with the rows that are routed to it. Threads divide the tiles of all runs by the passes over weights
that these take. A thread gathers a run's rows, applies the activation to its own outputs and quantizes them, so that
all this stays in its core's cache. Results do not depend on the number of threads.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_group
from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gates import SQUARED_RELU, activated, gated
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from hetero_kv.cpu_ops.quantized_linear import multiply_tiles
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

REAL1, REAL2 = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
INTEGER1, INTEGER2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
_CODES1, _CODES2 = types.Array(types.int8, 1, "C"), types.Array(types.int8, 2, "C")
_SUMS1, _SUMS2 = types.Array(types.int32, 1, "C"), types.Array(types.int32, 2, "C")
GATE_RUN, DOWN_RUN = 11, 8
"""Numbers of a run in the tables of "expert gates" and "expert downs"."""


def biases_type(dtype: str) -> Any:
    """The type of biases [experts, outputs], of dtype `dtype`, a key of `NUMBERS`; rows and columns may be strided."""
    return types.Array(NUMBERS[dtype], 2, "A")


@region_arguments("expert gates")
def _expert_gates(dtype: str) -> tuple[Any, ...]:
    """(runs, tokens, codes, scales, sums, inner_codes, inner_scales, inner_sums, gate_bias, up_bias, sharpness, limit,
    per_pass). runs [runs, GATE_RUN]: address of the gate's weights, tiles, addresses of the kernels for one row and for
    several; the same three addresses of the up projection; rows, first place in `tokens`, first inner code, and the row
    of the biases, or -1. tokens: the row of codes at each place. inner_codes, inner_scales, inner_sums: written, flat,
    the quantized activation(gate) * up."""
    real, biases = types.float32, biases_type(dtype)
    return (
        INTEGER2, INTEGER1, _CODES2, REAL2, _SUMS2, _CODES1, REAL1, _SUMS1, biases, biases, real, real, types.int64,
    )  # fmt: skip


@region_arguments("expert downs")
def _expert_downs(_: str) -> tuple[Any, ...]:
    """(runs, codes, scales, sums, out, per_pass), all arrays but `runs` flat. runs [runs, DOWN_RUN]: address of the
    weights, tiles, addresses of the kernels for one row and for several, rows, columns, first code, first number of
    out; a row of out has the numbers of all tiles."""
    return INTEGER2, _CODES1, REAL1, _SUMS1, REAL1, types.int64


@region_arguments("expert sums")
def _expert_sums(dtype: str) -> tuple[Any, ...]:
    """(places, chosen, shares, results, bias, first_shared, shared_shares, out): places [rows * k] is the row of
    `results` of each choice, or -1; first_shared: the row of the first output of the shared expert, or -1."""
    return INTEGER1, INTEGER2, REAL2, REAL2, biases_type(dtype), types.int64, REAL1, REAL2


@device_function
def _passes(rows, per_pass):
    return (rows + per_pass - 1) // per_pass


@device_function
def _share(runs, rows_at, per_pass, thread, threads):
    """Returns the first and the end pass of a thread, among the passes over all tiles of all runs."""
    total = np.int64(0)
    for run in range(runs.shape[0]):
        total += runs[run, 1] * _passes(runs[run, rows_at], per_pass)
    return total * thread // threads, total * (thread + 1) // threads


@device_function
def _part(start, stop, before, passes, units):
    """Returns the first and the end unit of a run that begin in passes `start` to `stop`; its first is `before`."""
    first = min(max(-((before - start) // passes), np.int64(0)), units)
    return first, min(max(-((before - stop) // passes), np.int64(0)), units)


@cache
def gates_region(kind: int, dtype: str) -> int:
    """Returns the address of the region "expert gates".

    kind: of the activation (`cpu_ops.gates`); one region per kind, as in `fused_decode_layer.gate_region`. dtype: of
    the biases. Tiles are in pairs, so that a thread has whole groups to quantize.
    """
    code_version = CODE_VERSION
    pair, has_gate = GROUP // TILE, kind != SQUARED_RELU
    parts = 1 + has_gate

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def compute(thread, threads, arguments):
        (
            runs, tokens, codes, scales, sums, inner_codes, inner_scales, inner_sums, gate_bias, up_bias, sharpness,
            limit, per_pass,
        ) = arguments_at("expert gates", dtype, arguments)  # fmt: skip
        columns = codes.shape[1]
        start, stop = _share(runs, 7, per_pass, thread, threads)
        before = np.int64(0)
        for run in range(runs.shape[0]):
            weights, tiles, one, several, up, up_one, up_several, rows, place, code, expert = runs[run]
            passes, inner = _passes(rows, per_pass), tiles * TILE
            first, end = _part(start, stop, before, pair * passes, tiles // pair)
            before += tiles * passes
            if first == end:
                continue
            if rows == 1:
                token = tokens[place]
                x, x_scales, x_sums = codes[token : token + 1], scales[token : token + 1], sums[token : token + 1]
            else:
                x = np.empty((rows, columns), np.int8)
                x_scales = np.empty((rows, columns // GROUP), np.float32)
                x_sums = np.empty((rows, columns // 16), np.int32)
                for row in range(rows):
                    token = tokens[place + row]
                    for i in range(columns):
                        x[row, i] = codes[token, i]
                    for i in range(x_scales.shape[1]):
                        x_scales[row, i] = scales[token, i]
                    for i in range(x_sums.shape[1]):
                        x_sums[row, i] = sums[token, i]
            width, ahead = (end - first) * GROUP, first * GROUP
            both = np.empty((rows, parts * width), np.float32)
            tile, end_tile = first * pair, end * pair
            multiply_tiles(weights, one, several, per_pass, x, x_scales, x_sums, both, -ahead, tile, end_tile)
            if has_gate:
                at_up = width - ahead
                multiply_tiles(up, up_one, up_several, per_pass, x, x_scales, x_sums, both, at_up, tile, end_tile)
            for row in range(rows):
                gates, ups = both[row, :width], both[row, width:]
                if expert >= 0 and gate_bias.size:
                    for i in range(width):
                        gates[i] += number(gate_bias[expert, ahead + i])
                        if has_gate:
                            ups[i] += number(up_bias[expert, ahead + i])
                for i in range(width):
                    if has_gate:
                        gates[i] = gated(gates[i], ups[i], kind, sharpness, limit)
                    else:
                        gates[i] = activated(gates[i], kind)
                at = code + row * inner + ahead
                for group in range(end - first):
                    target = at // GROUP + group
                    quantize_group(
                        both, parts * row * width + group * GROUP, inner_codes, target * GROUP, inner_scales, target,
                        inner_sums, 2 * target,
                    )  # fmt: skip
        return np.int64(0 * code_version)

    return address_of(compute)


@cache
def downs_region() -> int:
    """Returns the address of the region "expert downs"."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def compute(thread, threads, arguments):
        runs, codes, scales, sums, out, per_pass = arguments_at("expert downs", "", arguments)
        start, stop = _share(runs, 4, per_pass, thread, threads)
        before = np.int64(0)
        for run in range(runs.shape[0]):
            weights, tiles, one, several, rows, columns, code, place = runs[run]
            passes = _passes(rows, per_pass)
            first, end = _part(start, stop, before, passes, tiles)
            before += tiles * passes
            if first < end:
                groups, halves, width = columns // GROUP, columns // 16, tiles * TILE
                own_codes = codes[code : code + rows * columns].reshape(rows, columns)
                scale, total_at = code // GROUP, code // 16
                own_scales = scales[scale : scale + rows * groups].reshape(rows, groups)
                own_sums = sums[total_at : total_at + rows * halves].reshape(rows, halves)
                own_out = out[place : place + rows * width].reshape(rows, width)
                multiply_tiles(weights, one, several, per_pass, own_codes, own_scales, own_sums, own_out, 0, first, end)
        return np.int64(0 * code_version)

    return address_of(compute)


@cache
def sums_region(dtype: str) -> int:
    """Returns the address of the region "expert sums", which adds each row's results times their shares to out.

    dtype: of the biases.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def compute(thread, threads, arguments):
        places, chosen, shares, results, bias, first_shared, shared_shares, out = arguments_at(
            "expert sums", dtype, arguments
        )
        rows, k = chosen.shape
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            target = out[row]
            for choice in range(k):
                place, share = places[row * k + choice], shares[row, choice]
                if place >= 0:
                    result = results[place]
                    for i in range(target.size):
                        target[i] += share * result[i]
                    if bias.size:
                        own = bias[chosen[row, choice]]
                        for i in range(target.size):
                            target[i] += share * number(own[i])
            if first_shared >= 0:
                result, share = results[first_shared + row], shared_shares[row]
                for i in range(target.size):
                    target[i] += share * result[i]
        return np.int64(0 * code_version)

    return address_of(compute)
