"""Mamba's selective scan (arXiv:2312.00752, algorithm 2), for prompts and tokens, and the convolution before it.

Each channel has a state of its own, whose numbers decay by different factors: h = exp(dt A) h + dt x B, y = C h + D x.
Threads have tiles of channels, with the channels in the lanes, and scan all tokens of a tile with its state in cache.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import ISAS
from hetero_kv.cpu_ops.exponential import LOG2_E
from hetero_kv.cpu_ops.gates import sigmoid, softplus
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, offset

_REAL1, _REAL2, _REAL3 = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3))
#: Channels of a tile: with 16 states, the state and the decays of a tile take 16 KB.
_TILE = 128


@intrinsic(prefer_literal=True)
def _scan_lanes(typingctx, lanes, state, factors, pitch, at, state_dim, time, moved, b, c, token_at, total):
    """Update the states of `lanes` channels from `at` on by one token: 2 ** (time * factors) * state + b * moved.

    state, factors: [state_dim, pitch]. time, moved, total: [pitch]; the sums of the states times c are written to
    `total`. b, c: the token's numbers begin at `token_at`. All arrays are float32.
    """
    width = lanes.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        _, states, exponents, step, first, depth, times, added, gains, shares, place, sums = arguments
        state_pointer, factor_pointer, time_pointer, moved_pointer, total_pointer = (
            array_pointer(context, builder, kind, array, first)
            for kind, array in (
                (state, states), (factors, exponents), (time, times), (moved, added), (total, sums)
            )
        )  # fmt: skip
        gain_pointer = array_pointer(context, builder, b, gains, place)
        share_pointer = array_pointer(context, builder, c, shares, place)
        by, inputs, summed = v.load(time_pointer), v.load(moved_pointer), v.slots([v.zero])[0]
        with cgutils.for_range(builder, depth) as loop:
            row = builder.mul(loop.index, step)
            own = offset(builder, state_pointer, row)
            kept = v.exp2(builder.fmul(by, v.load(offset(builder, factor_pointer, row))))
            new = builder.fmul(inputs, v.broadcast(offset(builder, gain_pointer, loop.index)))
            updated = v.call("fmuladd", v.load(own), kept, new)
            v.store(updated, own)
            share = v.broadcast(offset(builder, share_pointer, loop.index))
            builder.store(v.call("fmuladd", share, updated, builder.load(summed)), summed)
        v.store(builder.load(summed), total_pointer)
        return context.get_dummy_value()

    position = types.int64
    return types.none(lanes, state, factors, position, position, position, time, moved, b, c, position, total), codegen


def _scan_types(variant: str) -> tuple[Any, ...]:
    numbers, results = (types.Array(NUMBERS[each], 3, "C") for each in variant.split())
    return numbers, numbers, _REAL3, _REAL3, numbers, types.int64, _REAL2, _REAL1, _REAL1, _REAL3, results


@region_arguments("selective scan")
def _scan(variant: str) -> tuple[Any, ...]:
    """The arguments of `selective_scan` from x to mixed."""
    return _scan_types(variant)


@cache
def scan_region(variant: str, instructions: str) -> int:
    """Returns the address of the region "selective scan", in which each thread has some tiles of channels.

    variant: as of `selective_scan`. instructions: a key of `cpu_features.ISAS`.
    """
    code_version, most, lanes = CODE_VERSION, _TILE, ISAS[instructions].float_lanes

    # Without "reassoc", by which `Vectors.exp2` would not round.
    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def compute(thread, threads, arguments):
        x, times, b, c, gates, column, decay, time_bias, skip, states, mixed = arguments_at(
            "selective scan", variant, arguments
        )
        rows, tokens, channels = x.shape
        state_dim = states.shape[2]
        tiles = -(-channels // most)
        state, factors, both = scratch(state_dim, most), scratch(state_dim, most), scratch(3, most)
        time, moved, total = both[0], both[1], both[2]
        for index in range(rows * tiles * thread // threads, rows * tiles * (thread + 1) // threads):
            row, start = index // tiles, index % tiles * most
            count = min(most, channels - start)
            end = start + count
            for i in range(state_dim):
                for j in range(count):
                    state[i, j] = states[row, start + j, i]
                    factors[i, j] = decay[i, start + j] * LOG2_E
            bias, skipped = time_bias[start:end], skip[start:end]
            for token in range(tokens):
                own, steps = x[row, token, start:end], times[row, token, start:end]
                for j in range(count):
                    time[j] = softplus(number(steps[j]) + bias[j])
                    moved[j] = time[j] * number(own[j])
                place = (row * tokens + token) * state_dim
                for j in range(0, count, lanes):
                    _scan_lanes(lanes, state, factors, most, j, state_dim, time, moved, b, c, place, total)
                gate, out = gates[row, token, column + start : column + end], mixed[row, token, start:end]
                for j in range(count):
                    factor = number(gate[j])
                    value = total[j] + skipped[j] * number(own[j])
                    out[j] = rounded(mixed, value * factor * sigmoid(factor))
            for i in range(state_dim):
                for j in range(count):
                    states[row, start + j, i] = state[i, j]
        return np.int64(0 * code_version)

    return address_of(compute)


@cache
def selective_scan(variant: str) -> Any:
    """Returns the kernel of Mamba's selective scan, from any state, with its gates.

    variant: dtypes of the inputs and of the result, two keys of `bfloat16_bits.NUMBERS` with a space between them. All
    arrays are C-contiguous.

    (run, scan, x, times, b, c, gates, column, decay, time_bias, skip, states, mixed, threads)

    scan: from `scan_region`. x: [rows, tokens, channels], after the convolution. times: of the same shape, time steps
    before bias and softplus. b, c: [rows, tokens, state_dim] float32. gates: [rows, tokens, any], whose numbers from
    `column` on are the channels' gates. decay: [state_dim, channels] float32, -exp(A_log). time_bias, skip: [channels]
    float32, the time step's bias and D. states: [rows, channels, state_dim] float32, updated. mixed: [rows, tokens,
    channels], written.
    """
    code_version, integer = CODE_VERSION, types.int64
    signature = types.void(integer, integer, *_scan_types(variant), integer)

    @njit(signature, nogil=True, cache=True, error_model="numpy")
    def scanned(run, scan, x, times, b, c, gates, column, decay, time_bias, skip, states, mixed, threads):
        scan_args = x, times, b, c, gates, column + 0 * code_version, decay, time_bias, skip, states, mixed
        run_region("selective scan", variant, run, scan, threads, scan_args)

    return scanned


@cache
def short_prompt_convolution(dtype: str) -> Any:
    """Returns the kernel of a causal convolution per channel and SiLU, whose results are rounded to the inputs' dtype.

    dtype: a key of `bfloat16_bits.NUMBERS`. All arrays are C-contiguous.

    (run, convolution, inputs, history, weight, bias, out, threads)

    convolution: from `recurrent_prompts.convolution_region`, to `dtype`. inputs: [rows, tokens, columns], which begin
    with the channels. history: [rows, channels, taps], the tokens before, zeros at the beginning. weight: [taps,
    channels], bias: [channels] float32, of length 0 for none. out: [rows, tokens, channels], written.
    """
    code_version, variant, integer = CODE_VERSION, f"{dtype} {dtype}", types.int64
    numbers = types.Array(NUMBERS[dtype], 3, "C")

    @njit(types.void(integer, integer, numbers, numbers, _REAL2, _REAL1, numbers, integer), nogil=True, cache=True)
    def convolve(run, convolution, inputs, history, weight, bias, out, threads):
        for row in range(inputs.shape[0]):
            before = history[row : row + 1]
            args = inputs[row], 0 * code_version, before, weight, bias, 0 * code_version, out[row]
            run_region("prompt convolution", variant, run, convolution, threads, args)

    return convolve
