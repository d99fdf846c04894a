"""Sparse causal attention of a prompt chunk: each block of queries attends to a list of runs of tokens.

It uses the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) with a block's queries in
the lanes: tokens are gathered from any address, and nothing is summed across lanes. It computes in bfloat16 on CPUs
with AVX512_BF16 (with AMX tiles if available, `run_attention_tiles`), and in float32 otherwise.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.array_checks import check_chunk
from hetero_kv.cpu_ops.bfloat16_bits import rounded
from hetero_kv.cpu_ops.bfloat16_tiles import LANES, add_values_of_lanes_bf16, lane_weights_bf16, score_tile_bf16
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import ISAS, has, isa
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.gathered_rows import copy_row, pair_rows
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK, are_sound
from hetero_kv.cpu_ops.listed_keys import MASKED, address_in, mask_future, next_listed, places_of
from hetero_kv.cpu_ops.matrix_tiles import multiply_tile
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.run_attention_tiles import attend_by_tiles, tiles_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.softmax_rows import rows_exp2, rows_most
from hetero_kv.cpu_ops.threads import kernel_threads

_TOKENS = 96
"""Tokens that are gathered at once: their keys, values and scores stay in the caches."""
_ROWS = 6
"""Rows of a register tile in bfloat16: with 4 vectors of columns they leave registers for the operands."""
_FLOAT_ROWS = 4


def runs_in_bfloat16(k_dim: int, v_dim: int) -> bool:
    """Whether `attend_runs` supports bfloat16 with these dimensions on this CPU."""
    return isa() == "avx512" and has("avx512bf16") and k_dim % LANES == 0 and v_dim % LANES == 0


def attend_runs(
    q: np.ndarray,
    past_k: np.ndarray,
    past_v: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    runs: np.ndarray,
    starts: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of n tokens to chosen tokens among `past` earlier ones and, causally, among themselves.

    q: [batch, heads, n, k_dim], past_k: [batch, kv_heads, past, k_dim], past_v: [batch, kv_heads, past, v_dim], k and
    v: [batch, kv_heads, n, dim]: all float32, or all bits of bfloat16 (uint16) where `runs_in_bfloat16`; only the last
    dimension must be contiguous. runs: [count, 2] int32, tokens [first, stop) of past and chunk. starts: int64,
    [batch * heads * blocks + 1], the first run of each row, head and block of `QUERY_BLOCK` queries. A block's runs
    ascend, are disjoint, and end with the block's own tokens. scale, above 0, multiplies the scores; softcap c > 0 then
    turns them into c * tanh(score / c). threads: number of threads (None: Numba's setting).

    Returns out [batch, n, heads, v_dim] in q's type and lse [batch, heads, n] float32, the natural logarithm of the sum
    of exp(score). Raises ValueError or TypeError for arrays that do not fit together or that the CPU cannot multiply,
    and for runs that are out of order, out of range or lack the block's own tokens.
    """
    inputs = (q, past_k, past_v, k, v)
    if any(each.ndim != 4 or each.dtype != q.dtype for each in inputs) or q.dtype not in (np.uint16, np.float32):
        raise TypeError("q, past_k, past_v, k and v must have four dimensions and be float32, or bits of bfloat16")
    batch, heads, n, k_dim = q.shape
    v_dim, past = v.shape[3], past_k.shape[2]
    check_chunk(*inputs)
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be above 0")
    is_bits = q.dtype == np.uint16
    if is_bits and not runs_in_bfloat16(k_dim, v_dim):
        raise ValueError(f"dims {k_dim} and {v_dim} must be multiples of {LANES}, on a CPU with AVX512_BF16")
    runs, starts = np.ascontiguousarray(runs, np.int32), np.ascontiguousarray(starts, np.int64)
    lists = batch * heads * -(-n // QUERY_BLOCK)
    if runs.ndim != 2 or runs.shape[1] != 2 or starts.shape != (lists + 1,):
        raise ValueError(f"runs {runs.shape} and starts {starts.shape} are not those of {lists} blocks")
    if not are_sound(runs, starts, past, n):
        raise ValueError("runs must lie in order, within past and chunk, and end with the block's own tokens")
    arrays = [each if each.strides[3] == each.itemsize else np.ascontiguousarray(each) for each in inputs]
    if is_bits:
        arrays = [each.view(np.uint32) if index in (0, 1, 3) else each for index, each in enumerate(arrays)]
    out = np.empty((batch, n, heads, v_dim), q.dtype)
    lse = np.empty((batch, heads, n), np.float32)
    if is_bits and multiplies_by_tiles():
        attend_by_tiles(arrays, runs, starts, scale, softcap, threads, out, lse)
        return out, lse
    region = address_of(_vector_region(is_bits, isa(), k_dim, v_dim, softcap > 0))
    with kernel_threads(threads) as used:
        arguments = (*arrays, runs, starts, float(scale), float(softcap), out, lse)
        call_region("attend runs", _variant(is_bits), region, arguments, used)
    return out, lse


def compile_for(in_bfloat16: bool, k_dim: int, v_dim: int, softcapped: bool) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first prompt needs it."""
    if in_bfloat16 and multiplies_by_tiles():
        tiles_region(k_dim, v_dim, softcapped)
    else:
        _vector_region(in_bfloat16, isa(), k_dim, v_dim, softcapped)


def _variant(in_bfloat16: bool) -> str:
    return "bfloat16" if in_bfloat16 else "float32"


@region_arguments("attend runs")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(q, past_k, past_v, k, v, runs, starts, scale, softcap, out, lse)."""
    is_bits = variant == "bfloat16"
    keys = types.Array(types.uint32 if is_bits else types.float32, 4, "A")
    values = types.Array(types.uint16 if is_bits else types.float32, 4, "A")
    out = types.Array(values.dtype, 4, "C")
    runs, starts = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")
    lse = types.Array(types.float32, 3, "C")
    return keys, keys, values, keys, values, runs, starts, types.float64, types.float64, out, lse


@cache
def _vector_region(in_bfloat16: bool, instructions: str, k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values.

    Numba prunes the branches on `in_bfloat16` that are not taken.
    """
    lanes = LANES if in_bfloat16 else ISAS[instructions].float_lanes
    columns, tokens, height = QUERY_BLOCK, _TOKENS, _ROWS if in_bfloat16 else _FLOAT_ROWS
    per_word = 2 if in_bfloat16 else 1
    depth = k_dim // per_word
    vectors = 4 if ISAS[instructions].registers == 32 else 2
    wide = vectors * lanes
    v_pad = -(-v_dim // lanes) * lanes
    v_full = v_pad // wide * wide
    v_rest = (v_pad - v_full) // lanes
    # The last register tile of queries may be incomplete.
    rows_padded = -(-columns // height) * height
    variant, code_version = _variant(in_bfloat16), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        q, past_k, past_v, k, v, runs, starts, scale, softcap, out, lse = arguments_at(
            "attend runs", variant, arguments
        )
        heads, n, kv_heads, past = q.shape[1], q.shape[2], k.shape[1], past_k.shape[2]
        blocks = -(-n // columns)
        # Float32 queries are scaled. Scaling bfloat16 queries would lose precision, so their scores are scaled instead.
        scaling = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        factor = scaling if in_bfloat16 and not softcapped else np.float32(1)
        transposed_q, keys = scratch(depth, columns).view(q.dtype), scratch(tokens, depth).view(q.dtype)
        scores, sums = scratch(tokens, columns), scratch(rows_padded, v_pad)
        values = scratch(tokens // per_word, v_pad).view(q.dtype)
        if in_bfloat16:
            weights = scratch(tokens // 2 + 1, columns).view(np.uint32)
        listed = np.empty(tokens, np.int64)
        most, totals, fresh = np.empty((3, columns), np.float32)
        for item in range(thread, starts.size - 1, threads):
            block, head, row = item % blocks, item // blocks % heads, item // blocks // heads
            kv_head, first = head // (heads // kv_heads), block * columns
            count = min(columns, n - first)
            key_places, value_places = places_of(past_k, k, row, kv_head), places_of(past_v, v, row, kv_head)
            transposed_q[:] = 0
            for i in range(count):
                for d in range(depth):
                    word = q[row, head, first + i, d]
                    transposed_q[d, i] = word if in_bfloat16 else word * scaling
            most[:], totals[:], sums[:] = MASKED, 0, 0
            run, token = starts[item], np.int64(0)
            while run < starts[item + 1]:
                run, token, filled = next_listed(runs, run, token, starts[item + 1], listed)
                pairs = (filled + 1) // 2
                for t in range(filled):
                    copy_row(depth, address_in(key_places, past, listed[t]), keys, t * depth)
                if in_bfloat16:
                    if filled % 2:
                        # The other half of an incomplete pair, masked below.
                        listed[filled] = listed[filled - 1]
                    for pair in range(pairs):
                        even = address_in(value_places, past, listed[2 * pair])
                        odd = address_in(value_places, past, listed[2 * pair + 1])
                        pair_rows(v_dim, even, odd, values, pair * v_dim)
                    for t in range(0, filled, height):
                        score_tile_bf16(height, depth, columns, keys, t * depth, transposed_q, columns, scores[t:])
                else:
                    for t in range(filled):
                        copy_row(v_dim, address_in(value_places, past, listed[t]), values, t * v_pad)
                    for i in range(0, columns, wide):
                        for t in range(0, filled, height):
                            multiply_tile(
                                lanes, height, vectors, 0, keys, t * k_dim, k_dim, 1, k_dim,
                                transposed_q, i, columns, scores, t * columns + i, columns,
                            )  # fmt: skip
                if softcapped:
                    for t in range(filled):
                        if in_bfloat16:
                            for i in range(columns):
                                scores[t, i] *= scaling
                        row_softcap(scores, t, columns, np.float32(softcap) * LOG2_E)
                if listed[filled - 1] > past + first:
                    mask_future(listed, filled, past + first, scores)
                if in_bfloat16 and filled % 2:
                    scores[filled] = MASKED
                for i in range(0, columns, lanes):
                    if rows_most(lanes, lanes, scores, i, columns, filled, most, i, fresh, i):
                        for j in range(i, i + lanes):
                            if most[j] == fresh[j]:
                                continue
                            rescale = exp2((most[j] - fresh[j]) * factor)
                            most[j] = fresh[j]
                            totals[j] *= rescale
                            for d in range(v_pad):
                                sums[j, d] *= rescale
                    if in_bfloat16:
                        lane_weights_bf16(columns, scores, i, pairs, factor, most, i, weights, totals)
                    else:
                        rows_exp2(lanes, scores, i, columns, filled, most, i, totals, i)
                for i in range(0, columns, height):
                    if in_bfloat16:
                        add_values_of_lanes_bf16(height, v_dim, columns, weights, i, pairs, values, sums, i * v_dim)
                    else:
                        for d in range(0, v_full, wide):
                            multiply_tile(
                                lanes, height, vectors, 1, scores, i, 1, columns, filled,
                                values, d, v_pad, sums, i * v_pad + d, v_pad,
                            )  # fmt: skip
                        if v_rest > 0:
                            multiply_tile(
                                lanes, height, v_rest, 1, scores, i, 1, columns, filled,
                                values, v_full, v_pad, sums, i * v_pad + v_full, v_pad,
                            )  # fmt: skip
            for i in range(count):
                for d in range(v_dim):
                    out[row, first + i, head, d] = rounded(out, sums[i, d] / totals[i])
                lse[row, head, first + i] = (most[i] * factor + np.log2(totals[i])) * LN_2
        return np.int64(0 * code_version)

    return attend
