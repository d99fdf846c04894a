"""Blocks of keys that a few queries of each block of queries match best, of those that it does not attend to anyway.

What queries in the middle of a prompt look for by its content, such as the earlier place where their own words stood,
lies on no line and no diagonal.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.amx_tiles import BLOCK, TILE, begin_tiles, end_tiles, multiplies_by_tiles, multiply_by_tiles
from cpu_ops.bfloat16_tiles import LANES, score_tile_bf16
from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import ISAS, isa
from cpu_ops.exponential import LOG2_E, exp2, row_softcap
from cpu_ops.inner import inner
from cpu_ops.kernel_address import address_of
from cpu_ops.key_runs import QUERY_BLOCK
from cpu_ops.listed_keys import UNSEEN
from cpu_ops.matrix_tiles import multiply_tile
from cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from cpu_ops.run_attention import runs_in_bfloat16
from cpu_ops.scratch import scratch
from cpu_ops.softmax_rows import rows_exp2, rows_most
from cpu_ops.threads import kernel_threads

ASKED = 4
"""Queries of a block that are asked, evenly spread, the last one among them."""
_COLUMNS = 64
"""Queries that are asked at once, of one or several blocks and heads: keys are read once for all of them."""
_ROWS = 4
"""Keys of a register tile."""


def matched_blocks(
    q: np.ndarray, past_k: np.ndarray, k: np.ndarray, runs: np.ndarray, starts: np.ndarray, scale: float,
    softcap: float = 0.0, threads: int | None = None,
) -> np.ndarray:  # fmt: skip
    """The attention that each block of keys receives from a few queries of each block of queries: the most by any.

    q: [heads, n, k_dim], a chunk's queries of heads that share keys; past_k: [past, k_dim] and k: [n, k_dim], the keys
    before the chunk and its own; all float32, or all bits of bfloat16 (uint16) where `run_attention.runs_in_bfloat16`.
    runs: [count, 2] int32 and starts: [heads * blocks + 1] int64, what the heads' blocks of `QUERY_BLOCK` queries
    attend to, as for `run_attention.attend_runs`. scale and softcap (0: none) as there. threads: how many to use
    (None: Numba's setting).

    Returns [heads, blocks, key blocks] float32: the largest share of a query's attention that a block's keys have which
    no run names; 0 where there is none. Key blocks have `QUERY_BLOCK` tokens. Raises ValueError or TypeError for arrays
    that do not fit together or that the CPU cannot multiply.
    """
    if any(each.dtype != q.dtype for each in (past_k, k)) or q.dtype not in (np.uint16, np.float32):
        raise TypeError("q, past_k and k must be float32, or bits of bfloat16")
    heads, n, k_dim = q.shape
    total = past_k.shape[0] + n
    if min(q.shape) < 1 or k.shape != (n, k_dim) or past_k.shape[1:] != (k_dim,):
        raise ValueError(f"q {q.shape}, past {past_k.shape} and k {k.shape} do not fit")
    is_bits = q.dtype == np.uint16
    if is_bits and not runs_in_bfloat16(k_dim, k_dim):
        raise ValueError(f"dim {k_dim} must be a multiple of {LANES}, on a CPU with AVX512_BF16")
    blocks = -(-n // QUERY_BLOCK)
    if starts.shape != (heads * blocks + 1,) or starts[0] < 0 or starts[-1] > len(runs) or (np.diff(starts) < 0).any():
        raise ValueError(f"starts {starts.shape} and runs {runs.shape} are not those of {heads * blocks} blocks")
    if len(runs) and (runs.min() < 0 or runs.max() > total):
        raise ValueError(f"runs must lie within {total} tokens")
    numbers = [np.ascontiguousarray(each) for each in (q, past_k, k)]
    if is_bits:
        numbers = [each.view(np.uint32) for each in numbers]
    out = np.zeros((heads, blocks, -(-total // QUERY_BLOCK)), np.float32)
    lists = np.ascontiguousarray(runs, np.int32), np.ascontiguousarray(starts, np.int64)
    region = address_of(_region(is_bits, is_bits and multiplies_by_tiles(), isa(), k_dim, softcap > 0))
    with kernel_threads(threads) as used:
        arguments = (*numbers, *lists, float(scale), float(softcap), out)
        call_region("match blocks", _variant(is_bits), region, arguments, used)
    return out


def compile_for(in_bfloat16: bool, k_dim: int, softcapped: bool) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first prompt needs it."""
    _region(in_bfloat16, in_bfloat16 and multiplies_by_tiles(), isa(), k_dim, softcapped)


def _variant(in_bfloat16: bool) -> str:
    return "bfloat16" if in_bfloat16 else "float32"


@region_arguments("match blocks")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(q, past_k, k, runs, starts, scale, softcap, out), as `matched_blocks` takes and gives them; bits as words."""
    number = types.uint32 if variant == "bfloat16" else types.float32
    q, keys = types.Array(number, 3, "C"), types.Array(number, 2, "C")
    lists = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")
    return q, keys, keys, *lists, types.float64, types.float64, types.Array(types.float32, 3, "C")


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _scaled(scores, factor):
    for t in range(scores.shape[0]):
        for column in range(scores.shape[1]):
            scores[t, column] *= factor


@inner(error_model="numpy")
def _mark(runs, first, stop, bit, named):
    """Set a bit of the tokens that the runs from `first` to `stop` name."""
    for run in range(first, stop):
        for t in range(runs[run, 0], runs[run, 1]):
            named[t] |= bit


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _free_sums(weights, named, out):
    """The sums of columns over keys that are not named for them: by a bit for each `ASKED` columns."""
    out[:] = 0
    for t in range(weights.shape[0]):
        bits = named[t]
        # Numbers of 32 bits, none of which might be negative: else vectors hold half as many.
        for column in range(_COLUMNS):
            is_named = np.int32((bits >> np.int32(np.uint32(column) // np.uint32(ASKED))) & 1)
            out[column] += weights[t, column] * np.float32(1 - is_named)


@inner(error_model="numpy")
def _gather(past_k, k, start, stop, keys):
    """Copy the keys of the tokens [start, stop) of past and chunk, with zeros behind them."""
    before = past_k.shape[0]
    for t in range(start, stop):
        keys[t - start, : k.shape[1]] = past_k[t] if t < before else k[t - before]
    keys[stop - start :] = 0


@cache
def _region(in_bfloat16: bool, by_tiles: bool, instructions: str, k_dim: int, softcapped: bool) -> Any:
    """Compile a thread's share for one shape: every so many columns; on disk Numba keys it by the constants below.

    As in `run_attention` queries are in the lanes, and what the branches on constants leave out is not compiled.
    """
    lanes = LANES if in_bfloat16 else ISAS[instructions].float_lanes
    vectors = 4 if ISAS[instructions].registers == 32 else 2
    columns, height, side, asked, tokens, wide = _COLUMNS, _ROWS, BLOCK, ASKED, QUERY_BLOCK, vectors * lanes
    words = k_dim // 2 if in_bfloat16 else k_dim
    depth = -(-words // TILE) * TILE if by_tiles else words
    variant, code_version = _variant(in_bfloat16), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def match(thread, threads, arguments):
        q, past_k, k, runs, starts, scale, softcap, out = arguments_at("match blocks", variant, arguments)
        before, n, (heads, blocks, key_blocks) = past_k.shape[0], k.shape[0], out.shape
        factor = np.float32(scale / softcap if softcapped else scale * LOG2_E)
        turned_q, gathered = scratch(depth, columns).view(q.dtype), scratch(tokens, depth).view(q.dtype)
        scores, sums, mosts = scratch(tokens, columns), scratch(key_blocks, columns), scratch(key_blocks, columns)
        most, totals, fresh = np.empty((3, columns), np.float32)
        shares = out.reshape(heads * blocks, key_blocks)
        # Whose a column is and how many tokens it sees; a bit for each block and head that attends to a token anyway.
        items, seen = np.empty((2, columns), np.int64)
        named = np.empty(key_blocks * tokens, np.int32)
        found = np.empty(64, np.uint8)
        if by_tiles:
            begin_tiles(found)
        queries, step = heads * blocks * asked, tokens // asked
        for first in range(thread * columns, queries, threads * columns):
            count, nearest, farthest = min(columns, queries - first), before + n, 0
            turned_q[:], named[:] = 0, 0
            for column in range(count):
                (block, head), number = divmod((first + column) // asked, heads), (first + column) % asked
                position = min(block * tokens + (number + 1) * step, n) - 1
                items[column], seen[column] = head * blocks + block, before + position + 1
                nearest, farthest = min(nearest, seen[column]), max(farthest, seen[column])
                if number == 0:
                    own, bit = starts[items[column] : items[column] + 2], np.int32(1 << column // asked)
                    _mark(runs, own[0], own[1], bit, named)
                for d in range(words):
                    turned_q[d, column] = q[head, position, d]
            most[:], totals[:] = UNSEEN, 0
            for key_block in range(-(-farthest // tokens)):
                start = key_block * tokens
                stop = start + tokens
                keys, key_at = gathered, 0
                if words == depth and stop <= before:
                    keys, key_at = past_k, start * depth
                elif words == depth and before <= start and stop <= before + n:
                    keys, key_at = k, (start - before) * depth
                else:
                    _gather(past_k, k, start, min(stop, before + n), gathered)
                if by_tiles:
                    for t in range(0, tokens, side):
                        for i in range(0, columns, side):
                            multiply_by_tiles(
                                0, keys, key_at + t * depth, depth, depth, turned_q, i, columns,
                                scores, t * columns + i, columns,
                            )  # fmt: skip
                elif in_bfloat16:
                    for t in range(0, tokens, height):
                        score_tile_bf16(height, depth, columns, keys, key_at + t * depth, turned_q, columns, scores[t:])
                else:
                    for i in range(0, columns, wide):
                        for t in range(0, tokens, height):
                            multiply_tile(
                                lanes, height, vectors, 0, keys, key_at + t * depth, depth, 1, depth,
                                turned_q, i, columns, scores, t * columns + i, columns,
                            )  # fmt: skip
                _scaled(scores, factor)
                if softcapped:
                    for t in range(tokens):
                        row_softcap(scores, t, columns, np.float32(softcap) * LOG2_E)
                if stop > nearest:
                    for column in range(count):
                        for t in range(max(seen[column] - start, 0), tokens):
                            scores[t, column] = UNSEEN
                for i in range(0, columns, lanes):
                    if rows_most(lanes, lanes, scores, i, columns, tokens, most, i, fresh, i):
                        for column in range(i, i + lanes):
                            totals[column] *= exp2(most[column] - fresh[column])
                            most[column] = fresh[column]
                    rows_exp2(lanes, scores, i, columns, tokens, most, i, totals, i)
                _free_sums(scores, named[start:stop], sums[key_block])
                mosts[key_block] = most
            for key_block in range(-(-farthest // tokens)):
                for column in range(columns):
                    share = exp2(mosts[key_block, column] - most[column]) / totals[column]
                    sums[key_block, column] *= share
                for column in range(count):
                    item = items[column]
                    shares[item, key_block] = max(shares[item, key_block], sums[key_block, column])
        if by_tiles:
            end_tiles(found)
        return np.int64(0 * code_version)

    return match
