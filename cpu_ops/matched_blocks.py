"""Finds key blocks that receive much attention from a block of queries but are not in its vertical-slash pattern.

A few queries of each block are scored against all earlier keys. This finds content on no vertical line and no diagonal,
such as an earlier occurrence of the queries' own words.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.amx_tiles import begin_tiles, end_tiles
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_exp2
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.listed_keys import LEAST
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.qk_tile import (
    QUERY_COLUMNS,
    QKTileShape,
    capped,
    free_block_weights,
    keys_of_block,
    mask_after,
    score_block,
    tile_queries,
)
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.softmax_rows import rows_most
from hetero_kv.cpu_ops.threads import kernel_threads

SAMPLED_QUERIES = 4
"""Sampled queries of a block: evenly spaced, including the last one."""


def matched_blocks(
    q: np.ndarray, past_k: np.ndarray, k: np.ndarray, runs: np.ndarray, starts: np.ndarray, scale: float,
    softcap: float = 0.0, threads: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns the attention of each key block's keys outside the runs, as maximum over a block's sampled queries.

    q: [heads, n, k_dim], a chunk's queries of heads that share keys. past_k, k: as for `qk_tile.tile_queries`.
    runs: [count, 2] int32 and starts: [heads * blocks + 1] int64, the keys that the heads' blocks of `QUERY_BLOCK`
    queries attend to, as for `run_attention.attend_runs`. scale and softcap (0: none) as there. threads: number of
    threads (None: Numba's setting).

    Returns [heads, blocks, key blocks] float32, shares of a query's attention; 0 if all keys are in runs. Key blocks
    have `QUERY_BLOCK` tokens. Raises ValueError or TypeError for arrays that do not fit together or that the CPU cannot
    multiply.
    """
    numbers = tile_queries(q, past_k, k, scale)
    (heads, n, k_dim), is_bits = q.shape, q.dtype == np.uint16
    total = past_k.shape[0] + n
    if len(k) != n:
        raise ValueError(f"q {q.shape} and k {k.shape} do not fit")
    blocks = -(-n // QUERY_BLOCK)
    if starts.shape != (heads * blocks + 1,) or starts[0] < 0 or starts[-1] > len(runs) or (np.diff(starts) < 0).any():
        raise ValueError(f"starts {starts.shape} and runs {runs.shape} are not those of {heads * blocks} blocks")
    if len(runs) and (runs.min() < 0 or runs.max() > total):
        raise ValueError(f"runs must lie within {total} tokens")
    # Heads come last, because queries of one tile write to neighbouring numbers.
    shares = np.zeros((-(-total // QUERY_BLOCK), blocks, heads), np.float32)
    lists = np.ascontiguousarray(runs, np.int32), np.ascontiguousarray(starts, np.int64)
    region = address_of(_region(QKTileShape.of(is_bits, k_dim), softcap > 0))
    with kernel_threads(threads) as used:
        arguments = (*numbers, *lists, float(scale), float(softcap), shares)
        call_region("match blocks", _variant(is_bits), region, arguments, used)
    return shares.transpose(2, 1, 0)


def best_blocks(shares: np.ndarray, count: int, threads: int | None = None) -> np.ndarray:
    """Returns the `count` key blocks with the largest shares above 0.

    shares: [heads, blocks, key blocks] float32, from `matched_blocks`. threads: number of threads (None: Numba's
    setting).

    Returns [heads, blocks, count] int32, ascending, with -1 in front if there are fewer.
    """
    best = np.full((*shares.shape[:2], count), -1, np.int32)
    if count:
        with kernel_threads(threads) as used:
            call_region(
                "best blocks", "", _best_region(), (np.ascontiguousarray(shares.transpose(2, 1, 0)), best), used
            )
    return best


def compile_for(in_bfloat16: bool, k_dim: int, softcapped: bool) -> None:
    """Compile the kernels of one shape, or load them from Numba's on-disk cache, before the first prompt needs them."""
    _region(QKTileShape.of(in_bfloat16, k_dim), softcapped)
    _best_region()


def _variant(in_bfloat16: bool) -> str:
    return "bfloat16" if in_bfloat16 else "float32"


@region_arguments("match blocks")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(q, past_k, k, runs, starts, scale, softcap, shares), as for `matched_blocks`; bfloat16 bits as words.

    shares: [key blocks, blocks, heads], written.
    """
    number = types.uint32 if variant == "bfloat16" else types.float32
    q, keys = types.Array(number, 3, "A"), types.Array(number, 2, "C")
    lists = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")
    return q, keys, keys, *lists, types.float64, types.float64, types.Array(types.float32, 3, "C")


@region_arguments("best blocks")
def _best_arguments(_: str) -> tuple[Any, ...]:
    """(shares [key blocks, blocks, heads], best [heads, blocks, count >= 1], filled with -1 and written)."""
    return types.Array(types.float32, 3, "C"), types.Array(types.int32, 3, "C")


@cache
def _best_region() -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def choose(thread, threads, arguments):
        shares, best = arguments_at("best blocks", "", arguments)
        key_blocks, (heads, blocks, count) = shares.shape[0], best.shape
        first, stop = blocks * thread // threads, blocks * (thread + 1) // threads
        # The best shares so far, ascending.
        values = np.zeros((stop - first, heads, count), np.float32)
        for key_block in range(key_blocks):
            for block in range(first, stop):
                for head in range(heads):
                    share = shares[key_block, block, head]
                    if not share > values[block - first, head, 0]:
                        continue
                    own, of, place = best[head, block], values[block - first, head], 0
                    while place + 1 < count and of[place + 1] < share:
                        own[place], of[place] = own[place + 1], of[place + 1]
                        place += 1
                    own[place], of[place] = key_block, share
        for head in range(heads):
            for block in range(first, stop):
                best[head, block].sort()
        return np.int64(0 * code_version)

    return address_of(choose)


@device_function(error_model="numpy")
def _mark(runs, first, stop, bit, named):
    """Set a bit of named [tokens] for the tokens in the runs from `first` to `stop`."""
    for run in range(first, stop):
        tokens = named[runs[run, 0] : runs[run, 1]]
        for t in range(tokens.size):
            tokens[t] |= bit


@cache
def _region(shape: QKTileShape, softcapped: bool) -> Any:
    """Compile a thread's share, every `threads`-th tile of columns, for one shape.

    Numba's disk cache keys it by the constants below.
    """
    kind, words, depth, lanes, vectors = shape.kind, shape.words, shape.depth, shape.lanes, shape.vectors
    columns, samples, tokens = QUERY_COLUMNS, SAMPLED_QUERIES, QUERY_BLOCK
    by_tiles, whole_rows = kind == "tiles", words == depth
    variant, code_version = _variant(kind != "floats"), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def match(thread, threads, arguments):
        q, past_k, k, runs, starts, scale, softcap, shares = arguments_at("match blocks", variant, arguments)
        before, n, (key_blocks, blocks, heads) = past_k.shape[0], k.shape[0], shares.shape
        factor = np.float32(1 if softcapped else scale * LOG2_E)
        transposed_q, gathered = scratch(depth, columns).view(q.dtype), scratch(tokens, depth).view(q.dtype)
        scores, sums, mosts = scratch(tokens, columns), scratch(key_blocks, columns), scratch(key_blocks, columns)
        most, totals, fresh = np.empty((3, columns), np.float32)
        by_item = shares.reshape(key_blocks, blocks * heads)
        # seen: tokens that a column's query sees. bits: one per block and head, set in `named` for tokens in its runs.
        seen = np.empty(columns, np.int64)
        bits = (1 << np.arange(columns) // samples).astype(np.int32)
        named = np.empty(key_blocks * tokens, np.int32)
        found = np.empty(64, np.uint8)
        if by_tiles:
            begin_tiles(found)
        queries, step = heads * blocks * samples, tokens // samples
        for first in range(thread * columns, queries, threads * columns):
            count, nearest, farthest = min(columns, queries - first), before + n, 0
            transposed_q[:], named[:] = 0, 0
            for column in range(count):
                (block, head), number = divmod((first + column) // samples, heads), (first + column) % samples
                position = min(block * tokens + (number + 1) * step, n) - 1
                seen[column] = before + position + 1
                nearest, farthest = min(nearest, seen[column]), max(farthest, seen[column])
                if number == 0:
                    own = starts[head * blocks + block : head * blocks + block + 2]
                    _mark(runs, own[0], own[1], bits[column], named)
                for d in range(words):
                    transposed_q[d, column] = q[head, position, d]
            most[:], totals[:] = LEAST, 0
            for key_block in range(-(-farthest // tokens)):
                start = key_block * tokens
                keys, key_at = keys_of_block(past_k, k, start, whole_rows, gathered)
                score_block(kind, lanes, vectors, depth, keys, key_at, transposed_q, 0, scores)
                if softcapped:
                    capped(scores, scale, softcap)
                if start + tokens > nearest:
                    mask_after(scores, start, seen[:count])
                for i in range(0, columns, lanes):
                    if rows_most(lanes, lanes, scores, i, columns, tokens, most, i, fresh, i):
                        for column in range(i, i + lanes):
                            totals[column] *= exp2((most[column] - fresh[column]) * factor)
                            most[column] = fresh[column]
                    free_block_weights(
                        lanes, scores, i, factor, most, totals, named, start, bits, sums, key_block * columns
                    )
                by_then = mosts[key_block]
                for column in range(columns):
                    by_then[column] = most[column]
            for key_block in range(-(-farthest // tokens)):
                for column in range(columns):
                    mosts[key_block, column] = (mosts[key_block, column] - most[column]) * factor
                row_exp2(mosts, key_block, columns, np.float32(0))
                for column in range(columns):
                    sums[key_block, column] *= mosts[key_block, column] / totals[column]
                for item in range(count // samples):
                    largest = np.float32(0)
                    for number in range(samples):
                        largest = max(largest, sums[key_block, item * samples + number])
                    by_item[key_block, first // samples + item] = largest
        if by_tiles:
            end_tiles(found)
        return np.int64(0 * code_version)

    return match
