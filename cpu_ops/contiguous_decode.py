"""Contiguous decode: attention of one query position to two ranges of tokens, each contiguous per head.

It uses the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) over tiles of tokens.
Threads divide the tiles of all rows, heads and ranges. Partial results of a head are merged by their log-sum-exps.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import accumulate_rows, score_rows
from hetero_kv.cpu_ops.softmax_rows import rows_exp2, rows_most
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.threads import on_threads
from hetero_kv.cpu_ops.tiles import tiles_for
from hetero_kv.cpu_ops.work_division import edge_buffers, keep_part, merge_edges

_TILE = 64
"""Tokens of a tile of scores."""


class TokenRange(NamedTuple):
    """A range of consecutive tokens.

    Attributes:
        keys: [rows, kv_heads, capacity, k_dim] of an ungrouped storage type.
        values: [rows, kv_heads, capacity, v_dim] of the same type.
        start: index of the first token.
        length: number of tokens.
    """

    keys: np.ndarray
    values: np.ndarray
    start: int
    length: int


def attend_ranges(
    q: np.ndarray,
    first: TokenRange,
    second: TokenRange,
    scale: float,
    softcap: float = 0.0,
    threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of one query position per row to the tokens of both ranges.

    q: [rows, kv_heads, group, k_dim] float32, grouped by kv head. first, second: of one type and, except for their
    capacities, one shape. scale, softcap: as in `cpu_ops.attention.attend_blocks`. threads: number of threads (None:
    Numba's setting).

    Returns out [rows, kv_heads, group, v_dim] float32 and lse [rows, kv_heads, group] float32, the natural logarithm of
    the sum of exp(score); 0 and -inf without tokens. Raises ValueError or TypeError for arrays that do not fit
    together, IndexError for tokens beyond a range's capacity.
    """
    (keys_a, values_a, start_a, count_a), (keys_b, values_b, start_b, count_b) = first, second
    shapes = q.shape, keys_a.shape, values_a.shape, keys_b.shape, values_b.shape
    kernel, region, dtype = _plan(*shapes, keys_a.dtype, isa())
    if not (
        0 <= start_a <= start_a + count_a <= keys_a.shape[2] and 0 <= start_b <= start_b + count_b <= keys_b.shape[2]
    ):
        raise IndexError(
            f"{count_a} tokens from {start_a} of {keys_a.shape[2]} and {count_b} from {start_b} of {keys_b.shape[2]}"
        )
    out, lse = np.empty((*q.shape[:3], values_a.shape[3]), np.float32), np.empty(q.shape[:3], np.float32)
    arrays = (each.view(dtype) for each in (keys_a, values_a, keys_b, values_b))
    called = kernel, all_threads(), region, q, *arrays
    on_threads(threads, *called, start_a, count_a, start_b, count_b, scale, softcap, out, lse)
    return out, lse


def compile_for(group: int, k_dim: int, v_dim: int, storage: str) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first token needs it."""
    _kernel(STORAGE_TYPES[storage].kernel_dtype.name)
    attend_region(isa(), storage, group, k_dim, v_dim)


@lru_cache(maxsize=4096)
def _plan(
    q: tuple[int, ...], keys_a: tuple[int, ...], values_a: tuple[int, ...], keys_b: tuple[int, ...],
    values_b: tuple[int, ...], dtype: np.dtype, instructions: str,
) -> tuple[Any, int, np.dtype]:  # fmt: skip
    storage = storage_of(dtype)
    fitting = len(q) == len(keys_a) == len(values_a) == 4 and storage.group == 1 and min(q[2:]) > 0
    for keys, values in ((keys_a, values_a), (keys_b, values_b)):
        fitting = fitting and keys == (*q[:2], keys[2], q[3]) and values == (*keys[:3], values_a[3])
    if not fitting or values_a[3] < 1:
        raise ValueError(
            f"q {q}, keys {keys_a} and {keys_b}, values {values_a} and {values_b} ({storage.name}) do not fit together"
        )
    region = address_of(attend_region(instructions, storage.name, q[2], q[3], values_a[3]))
    return _kernel(storage.kernel_dtype.name), region, storage.kernel_dtype


_REAL4, _REAL3 = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")
_PLACES, _FACTORS = (types.int64,) * 4, (types.float64,) * 2


@region_arguments("attend ranges")
def _arguments(numbers: str) -> tuple[Any, ...]:
    """(q, keys_a, values_a, keys_b, values_b, start_a, count_a, start_b, count_b, scale, softcap, edges, edge_sums,
    edge_most, edge_total, out, lse), edges as in `list_attention.arguments`."""
    pool, real2 = types.Array(from_dtype(np.dtype(numbers)), 4, "C"), types.Array(types.float32, 2, "C")
    edges = types.Array(types.int64, 1, "C"), _REAL3, real2, real2
    return (_REAL4, pool, pool, pool, pool, *_PLACES, *_FACTORS, *edges, _REAL4, _REAL3)


@cache
def _kernel(numbers: str) -> Any:
    code_version = CODE_VERSION

    pool = types.Array(from_dtype(np.dtype(numbers)), 4, "C")
    addresses = types.int64, types.int64
    signature = types.int64(
        *addresses, _REAL4, pool, pool, pool, pool, *_PLACES, *_FACTORS, _REAL4, _REAL3, types.int64
    )  # fmt: skip

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def attend_both(
        run, region, q, keys_a, values_a, keys_b, values_b, start_a, count_a, start_b, count_b, scale, softcap, out,
        lse, threads,
    ):  # fmt: skip
        if count_a + count_b == 0:
            out[:], lse[:] = 0, -np.inf
            return np.int64(0)
        group, v_dim = out.shape[2:]
        edges, edge_sums, edge_most, edge_total = edge_buffers(threads, group, v_dim)
        region_args = (
            q, keys_a, values_a, keys_b, values_b, start_a, count_a, start_b, count_b, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        )  # fmt: skip
        run_region("attend ranges", numbers, run, region, threads, region_args)
        merge_edges(edges, edge_sums, edge_most, edge_total, out, lse)
        return np.int64(0 * code_version)

    return attend_both


@cache
def attend_region(instructions: str, storage: str, group: int, k_dim: int, v_dim: int) -> Any:
    """Returns the region "attend ranges" of one shape, for keys and values of an ungrouped storage type."""
    tiles = tiles_for(instructions, group, _TILE)
    lanes, _, tile_queries, _, row_size, tile_tokens, columns = tiles
    num_tiles, tile_scores = tiles.number, _TILE * row_size + lanes
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        (
            q, keys_a, values_a, keys_b, values_b, start_a, count_a, start_b, count_b, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        ) = arguments_at("attend ranges", numbers, arguments)  # fmt: skip
        kv_heads = q.shape[1]
        tiles_a, tiles_b = (count_a + _TILE - 1) // _TILE, (count_b + _TILE - 1) // _TILE
        of_list = tiles_a + tiles_b
        total = q.shape[0] * kv_heads * of_list
        factor = np.float32(scale / softcap if softcap > 0 else scale * LOG2_E)
        first, last = total * thread // threads, total * (thread + 1) // threads
        scaled_q, sums, scores = scratch(group, k_dim), scratch(group, v_dim), scratch(num_tiles, tile_scores)
        most, fresh, totals = np.empty((3, num_tiles, lanes), np.float32)
        for item in range(first, last):
            index, place = item // of_list, item % of_list
            row, head = index // kv_heads, index % kv_heads
            if place == 0 or item == first:
                most[:], totals[:], sums[:] = -np.inf, 0, 0
                for g in range(group):
                    for d in range(k_dim):
                        scaled_q[g, d] = q[row, head, g, d] * factor
            in_b = place >= tiles_a
            keys, values = keys_b if in_b else keys_a, values_b if in_b else values_a
            begin = (place - tiles_a) * _TILE if in_b else place * _TILE
            count: Any = min(_TILE, (count_b if in_b else count_a) - begin)
            token = index * keys.shape[2] + begin + (start_b if in_b else start_a)
            whole = count - count % tile_tokens
            for t in range(0, whole, tile_tokens):
                score_rows(
                    lanes, storage, k_dim, group, tile_queries, tile_tokens, row_size, scaled_q, 0,
                    keys, (token + t) * k_dim, scores, t * row_size, tile_scores,
                )  # fmt: skip
            for t in range(whole, count):
                score_rows(
                    lanes, storage, k_dim, group, tile_queries, 1, row_size, scaled_q, 0,
                    keys, (token + t) * k_dim, scores, t * row_size, tile_scores,
                )  # fmt: skip
            vectors: Any = (count * row_size + lanes - 1) // lanes
            for tile in range(num_tiles):
                scores[tile, count * row_size : vectors * lanes] = -np.inf
                if softcap > 0:
                    row_softcap(scores, tile, count * row_size, np.float32(softcap) * LOG2_E)
                at: Any = tile * lanes
                if rows_most(lanes, row_size, scores, tile * tile_scores, lanes, vectors, most, at, fresh, at):
                    for g in range(tile * tile_queries, min(group, (tile + 1) * tile_queries)):
                        lane = g - tile * tile_queries
                        rescale = exp2(most[tile, lane] - fresh[tile, lane])
                        for d in range(v_dim):
                            sums[g, d] *= rescale
                    for lane in range(lanes):
                        totals[tile, lane] *= exp2(most[tile, lane] - fresh[tile, lane])
                        most[tile, lane] = fresh[tile, lane]
                rows_exp2(lanes, scores, tile * tile_scores, lanes, vectors, most, at, totals, at)
            accumulate_rows(
                lanes, storage, v_dim, group, tile_queries, row_size, columns, scores, 0, tile_scores, 1,
                values, token * v_dim, count, sums, keys, 0, 0, 0,
            )  # fmt: skip
            if place == of_list - 1 or item == last - 1:
                edge = 2 * thread + (0 if index * of_list < first else 1)
                is_whole = index * of_list >= first and (index + 1) * of_list <= last
                keep_part(
                    index, edge, is_whole, tile_queries, row_size, most, totals, sums, edges, edge_sums, edge_most,
                    edge_total, out, lse,
                )  # fmt: skip
        return np.int64(0 * code_version)

    return attend
