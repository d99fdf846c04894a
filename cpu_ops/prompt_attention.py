"""Causal attention of a prompt chunk to earlier tokens and to itself, in the model's dtype.

The kernel for bfloat16 is here; it needs a CPU with bfloat16 products. `prompt_attention_float32` has the one for
float32. It uses the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) for all query
heads of a kv head together. Keys and values of a few tokens at a time are laid out as pairs for the dot products
(`bfloat16_tiles`) and multiplied with all queries of a work item. The layout therefore costs little, and no buffer
grows with the prompt.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.array_checks import check_chunk
from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, float_to_bfloat16
from hetero_kv.cpu_ops.bfloat16_tiles import COLUMNS, LANES, add_values_bf16, row_largest, row_weights, score_tile_bf16
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import has, isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, compile_call, region_arguments
from hetero_kv.cpu_ops.prompt_attention_float32 import float32_region
from hetero_kv.cpu_ops.prompt_attention_tiles import tiles_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.threads import kernel_threads

_ROWS = 6
"""Queries of a register tile: with 4 vectors of columns they leave registers for the operands."""
_KEYS = 128
"""Tokens that are laid out at once: with a tile's scores they fit into the L1 cache."""
_ITEM_ROWS = 128 * _ROWS
"""Queries of a work item: their sums fit into the L2 cache."""


def attends_in_bfloat16(k_dim: int, v_dim: int) -> bool:
    """Whether `attend_prompt` supports these dimensions on this CPU and is the fastest choice.

    It is not if the CPU has AMX tiles that the system denies to this process: torch's attention may be faster then.
    """
    instructions = isa() == "avx512" and has("avx512bf16") and (multiplies_by_tiles() or not has("amx-bf16"))
    return instructions and k_dim % LANES == 0 and v_dim % LANES == 0


def attends_in_float32() -> bool:
    """Whether `attend_prompt` is the fastest choice in float32: where it was measured, under AVX2."""
    return isa() == "avx2"


def attend_prompt(
    q: np.ndarray,
    past_k: np.ndarray,
    past_v: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of n tokens to `past` earlier tokens and, causally, to themselves.

    q: [batch, kv_heads * group, n, k_dim], past_k: [batch, kv_heads, past, k_dim], past_v: [batch, kv_heads, past,
    v_dim], k: [batch, kv_heads, n, k_dim], v: [batch, kv_heads, n, v_dim]: float32, or the bits of bfloat16, uint16.
    scale multiplies the scores, and is above 0 in bfloat16; softcap c > 0 then turns them into c * tanh(score / c).
    window: a query sees this many of the last tokens, including its own (None: all). threads: number of threads (None:
    Numba's setting).

    Factors and weights have the inputs' dtype, and all sums are float32.

    Returns out [batch, n, heads, v_dim], of the inputs' dtype, and lse [batch, heads, n] float32, the natural logarithm
    of the sum of exp(score). Raises ValueError or TypeError for arrays that do not fit together or that the CPU cannot
    multiply (`attends_in_bfloat16`).
    """
    inputs = (q, past_k, past_v, k, v)
    dtype = q.dtype
    if any(each.ndim != 4 or each.dtype != dtype for each in inputs) or dtype.name not in NUMBERS:
        raise TypeError(
            "q, past_k, past_v, k and v must have four dimensions and be float32 or the bits of bfloat16 (uint16)"
        )
    batch, heads, n, k_dim = q.shape
    v_dim, past = v.shape[3], past_k.shape[2]
    check_chunk(*inputs)
    if (dtype == np.uint16 and not scale > 0) or (window is not None and window < 1):
        raise ValueError(f"scale is {scale} and window {window}; they must be above 0")
    if dtype == np.uint16 and (k_dim % LANES or v_dim % LANES or not has("avx512bf16")):
        raise ValueError(f"dims {k_dim} and {v_dim} must be multiples of {LANES}, on a CPU with AVX512_BF16")
    arrays = [each if each.strides[3] == each.itemsize else np.ascontiguousarray(each) for each in inputs]
    out = np.empty((batch, n, heads, v_dim), dtype)
    lse = np.empty((batch, heads, n), np.float32)
    region = address_of(_region(dtype.name, k_dim, v_dim, softcap > 0))
    arguments = (*arrays, float(scale), float(softcap), past + n if window is None else window, out, lse)
    with kernel_threads(threads) as used:
        call_region("attend prompt", dtype.name, region, arguments, used)
    return out, lse


def compile_for(dtype: str, k_dim: int, v_dim: int, softcapped: bool) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first prompt needs it.

    dtype: of the arrays, 'float32' or 'uint16'.
    """
    _region(dtype, k_dim, v_dim, softcapped)
    compile_call("attend prompt", dtype)


@region_arguments("attend prompt")
def _arguments(dtype: str) -> tuple[Any, ...]:
    """(q, past_k, past_v, k, v, scale, softcap, window, out, lse)."""
    numbers, real3 = types.Array(NUMBERS[dtype], 4, "A"), types.Array(types.float32, 3, "C")
    out = types.Array(NUMBERS[dtype], 4, "C")
    return numbers, numbers, numbers, numbers, numbers, types.float64, types.float64, types.int64, out, real3


def _region(dtype: str, k_dim: int, v_dim: int, softcapped: bool) -> Any:
    if dtype == "float32":
        return float32_region(isa(), k_dim, v_dim, softcapped)
    if multiplies_by_tiles():
        return tiles_region(k_dim, v_dim, softcapped)
    return _vector_region(k_dim, v_dim, softcapped)


@cache
def _vector_region(k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    depth, tile_rows, tile_keys, item_rows, columns = k_dim // 2, _ROWS, _KEYS, _ITEM_ROWS, COLUMNS
    pair_pitch = tile_keys // 2
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        q, past_k, past_v, k, v, scale, softcap, window, out, lse = arguments_at("attend prompt", "uint16", arguments)
        batch, heads, n, _ = q.shape
        kv_heads, past = k.shape[1], past_k.shape[2]
        group = heads // kv_heads
        per_head = -(-(n * group) // item_rows)
        items = batch * kv_heads * per_head
        factor = np.float32(1) if softcapped else np.float32(scale * LOG2_E)
        before_cap = np.float32(scale / softcap) if softcapped else np.float32(0)
        words = np.zeros((item_rows, depth), np.uint32)
        key_words, value_words = np.zeros((depth, tile_keys), np.uint32), np.zeros((pair_pitch, v_dim), np.uint32)
        scores, sums = scratch(tile_rows, tile_keys), scratch(item_rows, v_dim)
        weights = np.zeros((tile_rows, tile_keys), np.uint16)
        most, totals = np.empty((2, item_rows), np.float32)
        # Later queries see more keys. Threads take items in alternating order, to balance the load.
        for turn in range(-(-items // threads)):
            item = turn * threads + (thread if turn % 2 == 0 else threads - 1 - thread)
            if item >= items:
                continue
            index, part = item % (batch * kv_heads), item // (batch * kv_heads)
            row, head = index // kv_heads, index % kv_heads
            first = part * item_rows
            count = min(item_rows, n * group - first)
            _gather(q, row, head * group, group, first, count, words)
            most[:], totals[:], sums[:] = -np.inf, 0, 0
            end: Any = past + (first + count - 1) // group + 1
            begin: Any = max(0, past + first // group + 1 - window)
            for start in range(begin, end, tile_keys):
                keys: Any = min(tile_keys, end - start)
                _lay_out_keys(past_k, k, row, head, start, keys, key_words)
                _lay_out_values(past_v, v, row, head, start, keys, value_words)
                for tile in range(0, count, tile_rows):
                    rows: Any = min(tile_rows, count - tile)
                    # Keys of this pass that the tile's last query sees; `wide` rounds them up to whole vectors.
                    seen: Any = min(keys, past + (first + tile + rows - 1) // group + 1 - start)
                    if seen <= 0:
                        continue
                    wide: Any = -(-seen // columns) * columns
                    score_tile_bf16(tile_rows, depth, tile_keys, words, tile * depth, key_words, wide, scores)
                    for r in range(rows):
                        at: Any = tile + r
                        own: Any = max(0, min(seen, past + (first + at) // group + 1 - start))
                        if softcapped:
                            for j in range(own):
                                scores[r, j] *= before_cap
                            row_softcap(scores, r, own, np.float32(softcap) * LOG2_E)
                        scores[r, own:wide] = -np.inf
                        # Tokens before the window.
                        scores[r, : max(0, min(own, past + (first + at) // group + 1 - window - start))] = -np.inf
                        top = row_largest(scores, r * tile_keys, wide) * factor
                        if top > most[at]:
                            rescale = exp2(most[at] - top)
                            for d in range(v_dim):
                                sums[at, d] *= rescale
                            totals[at] *= rescale
                            most[at] = top
                        if most[at] == -np.inf:
                            weights[r, :wide] = 0
                            continue
                        totals[at] += row_weights(scores, r * tile_keys, wide, factor, most[at], weights, r * tile_keys)
                    add_values_bf16(tile_rows, v_dim, pair_pitch, weights, wide // 2, value_words, sums, tile * v_dim)
            for at in range(count):
                token, query = (first + at) // group, head * group + (first + at) % group
                for d in range(v_dim):
                    out[row, token, query, d] = float_to_bfloat16(sums[at, d] / totals[at])
                lse[row, query, token] = (most[at] + np.log2(totals[at])) * LN_2
        return np.int64(0 * code_version)

    return attend


@device_function
def _gather(q, row, head, group, first, count, words):
    """Copy the queries [first, first + count) of a kv head as words; query index = token * group + head in group."""
    for at in range(count):
        token, query = (first + at) // group, head + (first + at) % group
        for d in range(words.shape[1]):
            words[at, d] = np.uint32(q[row, query, token, 2 * d]) | np.uint32(q[row, query, token, 2 * d + 1]) << 16
    words[count:] = 0


@device_function
def _lay_out_keys(past_k, k, row, head, start, count, words):
    """Write keys [start, start + count) of past and chunk as columns of words; the other columns are zeroed."""
    past = past_k.shape[2]
    for j in range(count):
        token = start + j
        key = past_k[row, head, token] if token < past else k[row, head, token - past]
        for d in range(words.shape[0]):
            words[d, j] = np.uint32(key[2 * d]) | np.uint32(key[2 * d + 1]) << 16
    words[:, count:] = 0


@device_function
def _lay_out_values(past_v, v, row, head, start, count, words):
    """Write values [start, start + count) of past and chunk, a pair of tokens per word, followed by zeros."""
    past = past_v.shape[2]
    words[-(-count // 2) :] = 0
    for j in range(count):
        token = start + j
        value = past_v[row, head, token] if token < past else v[row, head, token - past]
        if j % 2 == 0:
            for d in range(words.shape[1]):
                words[j // 2, d] = np.uint32(value[d])
        else:
            for d in range(words.shape[1]):
                words[j // 2, d] |= np.uint32(value[d]) << 16
