"""Causal attention of a short turn: the last tokens of each sequence attend to all stored blocks, read in place.

A block's keys and values are widened to float32 once for all queries. A tile of tokens is then multiplied with tiles
of queries: scores [tokens, queries] with the queries in the lanes, the online softmax of FlashAttention (Dao et al.
2022, arXiv:2205.14135, algorithm 1) over whole vectors, and the weighted values. Keys and values are not transposed.
"""

import sys
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from hetero_kv.cpu_ops import causal_attention_bf16, causal_attention_tiles
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.array_checks import check_lists, check_offsets, outside_pool
from hetero_kv.cpu_ops.attention import NO_OFFSETS
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import ISAS, isa
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.list_attention import TOO_SHORT, kernel_for
from hetero_kv.cpu_ops.matrix_tiles import decode_rows, multiply_tile
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at
from hetero_kv.cpu_ops.run_attention import runs_in_bfloat16
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import prefetch
from hetero_kv.cpu_ops.softmax_rows import rows_exp2, rows_most
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of, storage_of
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.work_division import keep_part, own_entries

_TOKENS = 64
"""Tokens of a tile: their widened keys and values and a tile of scores fit into the L1 cache."""
_ROWS = 4
"""Rows of a register tile; a tile has 4 vectors of columns on CPUs with 32 vector registers, else 2."""
_FEWEST_QUERIES, _FEWEST_BY_TILES = 33, 14
"""Of fewer, most of a tile of the bfloat16 kernel would be empty, without AMX and with it."""
MASKED = np.float32(-3e38)
"""Score of a token that a query does not see. It is finite, so that a query which sees none has a finite maximum."""


def attend_blocks_causal(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_ids: np.ndarray,
    block_counts: np.ndarray,
    block_lengths: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    threads: int | None = None,
    key_offsets: np.ndarray | None = None,
    *,
    in_bfloat16: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of each sequence's last q_len tokens to the listed blocks, which include those tokens.

    q: [rows, q_len, kv_heads, group, k_dim] float32. keys, values, block_ids, block_counts, block_lengths, scale,
    softcap and key_offsets as for `attention.attend_blocks`; a list names the blocks in the order of the sequence, and
    query i sees the first n - q_len + i + 1 of its n tokens. threads: number of threads (None: Numba's setting).
    in_bfloat16: whether q, and the keys and values before they were stored, have bfloat16 numbers. Then many queries
    are computed in bfloat16, as `run_attention` does, where the CPU can (`is_in_bfloat16`).

    Returns out [rows, q_len, kv_heads, group, v_dim] float32 and lse [rows, q_len, kv_heads, group] float32, the
    natural logarithm of the sum of exp(score).

    Raises ValueError or TypeError for arrays that do not fit together or a list of fewer than q_len tokens,
    IndexError for ids, counts or lengths that point outside the pool.
    """
    if q.ndim != 5 or q.dtype != np.float32 or q.shape[1] < 1:
        raise ValueError(f"q {q.shape} {q.dtype} must be [rows, q_len >= 1, kv_heads, group, k_dim] float32")
    rows, q_len, kv_heads, group, k_dim = q.shape
    k_storage, v_storage, v_dim = check_lists(
        (rows, kv_heads, group, k_dim), keys.shape, values.shape, block_ids.shape, block_counts.shape,
        block_lengths.shape, keys.dtype, values.dtype,
    )  # fmt: skip
    arrays = (keys, values, block_ids, block_counts, block_lengths)
    if any(not each.flags.c_contiguous for each in arrays) or any(each.dtype != np.int32 for each in arrays[2:]):
        raise TypeError("keys, values, block_ids, block_counts and block_lengths must be C-contiguous, the last int32")
    offsets = NO_OFFSETS if key_offsets is None else key_offsets
    check_offsets(None if key_offsets is None else offsets.shape, keys.shape, k_dim)
    shape = group, k_dim, v_dim
    if in_bfloat16 and key_offsets is None and is_in_bfloat16(q_len, *shape, k_storage.name, v_storage.name):
        region = address_of(_region_bf16(k_storage.name, *shape, softcap > 0))
    else:
        region = address_of(
            _region(isa(), k_storage.name, v_storage.name, *shape, softcap > 0, key_offsets is not None)
        )
    kernel = kernel_for(numbers_of(k_storage, v_storage))
    out = np.empty((rows, kv_heads, q_len * group, v_dim), np.float32)
    lse = np.empty((rows, kv_heads, q_len * group), np.float32)
    pools = keys.view(k_storage.kernel_dtype), values.view(v_storage.kernel_dtype)
    with kernel_threads(threads) as used:
        called = all_threads(), region, q_len, np.ascontiguousarray(q), *pools, offsets, *arrays[2:]
        status = kernel(*called, scale, softcap, used, out, lse)
    if status == TOO_SHORT:
        raise ValueError(f"a list has fewer tokens than the {q_len} queries at its end")
    if status < 0:
        raise IndexError(outside_pool(status, keys, block_ids, block_counts, block_lengths))
    heads_last = (0, 2, 1, 3)
    return (
        np.ascontiguousarray(out.reshape(rows, kv_heads, q_len, group, v_dim).transpose(*heads_last, 4)),
        np.ascontiguousarray(lse.reshape(rows, kv_heads, q_len, group).transpose(heads_last)),
    )


def compile_for(
    keys: np.dtype, values: np.dtype, group: int, k_dim: int, v_dim: int, softcapped: bool, *, offset: bool,
    in_bfloat16: bool,
) -> None:  # fmt: skip
    """Compile the kernels of one shape, or load them from Numba's on-disk cache, before the first prompt needs them.

    keys, values: types of the pool's arrays. offset: whether keys have offsets. in_bfloat16: as for
    `attend_blocks_causal`.
    """
    k_storage, v_storage = storage_of(keys), storage_of(values)
    names, shape = (k_storage.name, v_storage.name), (group, k_dim, v_dim)
    kernel_for(numbers_of(k_storage, v_storage))
    _region(isa(), *names, *shape, softcapped, offset)
    if in_bfloat16 and not offset and is_in_bfloat16(_fewest_queries(), *shape, *names):
        _region_bf16(k_storage.name, *shape, softcapped)


def regions_for(
    keys: np.dtype, values: np.dtype, group: int, k_dim: int, v_dim: int, softcapped: bool, *, in_bfloat16: bool
) -> tuple[int, int, int]:
    """Addresses of the regions in float32 and by tiles, for `list_attention.kernel_for`, as by `compile_for`.

    Returns also how many queries of a kv head are computed by tiles, at least; without the second region, more than
    there are.
    """
    names, shape = (storage_of(keys).name, storage_of(values).name), (group, k_dim, v_dim)
    in_float32 = address_of(_region(isa(), *names, *shape, softcapped, False))
    fewest = _fewest_queries()
    if not (in_bfloat16 and multiplies_by_tiles() and is_in_bfloat16(fewest, *shape, *names)):
        return in_float32, 0, sys.maxsize
    return in_float32, address_of(causal_attention_tiles.region(names[0], *shape, softcapped, True)), fewest


def is_in_bfloat16(q_len: int, group: int, k_dim: int, v_dim: int, storage: str, value_storage: str) -> bool:
    """Whether `attend_blocks_causal` computes so many bfloat16 queries in bfloat16.

    float16 stores bfloat16 numbers as they are, but for those below 2^-14; coarser types do not.
    """
    is_stored = storage == value_storage and storage in ("bfloat16", "float16")
    return is_stored and q_len * group >= _fewest_queries() and runs_in_bfloat16(k_dim, v_dim)


def _fewest_queries() -> int:
    return _FEWEST_BY_TILES if multiplies_by_tiles() else _FEWEST_QUERIES


def _region_bf16(storage: str, group: int, k_dim: int, v_dim: int, softcapped: bool) -> Any:
    """A thread's share in bfloat16."""
    if multiplies_by_tiles():
        return causal_attention_tiles.region(storage, group, k_dim, v_dim, softcapped, False)
    return causal_attention_bf16.region(storage, group, k_dim, v_dim, softcapped)


@cache
def _region(
    instructions: str, storage: str, value_storage: str, group: int, k_dim: int, v_dim: int, softcapped: bool,
    offset: bool,
) -> Any:  # fmt: skip
    """Compile a thread's share for one shape. Numba's disk cache keys it by the constants below, all plain values."""
    lanes = ISAS[instructions].float_lanes
    most_vectors = 4 if ISAS[instructions].registers == 32 else 2
    k_pad, v_pad = -(-k_dim // lanes) * lanes, -(-v_dim // lanes) * lanes
    tile_columns = most_vectors * lanes
    v_full = v_pad // tile_columns * tile_columns
    v_rest = (v_pad - v_full) // lanes
    k_units, v_units = STORAGE_TYPES[storage].units(k_dim), STORAGE_TYPES[value_storage].units(v_dim)
    tokens, height, wide = _TOKENS, _ROWS, most_vectors == 4
    numbers, code_version = numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[value_storage]), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(thread, threads, arguments):
        (
            starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        ) = arguments_at("attend lists", numbers, arguments)  # fmt: skip
        q_len, kv_heads, block_size = q.shape[1], q.shape[2], keys.shape[2]
        queries = q_len * group
        q_pad = -(-queries // lanes) * lanes
        lists = starts.size - 1
        total = starts[lists]
        factor = np.float32(scale / softcap) if softcapped else np.float32(scale * LOG2_E)
        first, last = total * thread // threads, total * (thread + 1) // threads
        # The queries of a tile are contiguous, so that they stay in the L1 cache.
        transposed_q = scratch(-(-q_pad // tile_columns), k_dim * tile_columns)
        wide_keys, wide_values, wide_offset = scratch(tokens, k_pad), scratch(tokens, v_pad), scratch(1, k_pad)
        scores, sums = scratch(tokens, tile_columns), scratch(q_pad, v_pad)
        most, fresh, totals = np.empty((3, q_pad), np.float32)
        for index in range(lists):
            if starts[index + 1] <= first or starts[index] >= last:
                continue
            row, head = index // kv_heads, index % kv_heads
            which = min(head, block_ids.shape[1] - 1)
            ids, count_of_list = block_ids[row, which], np.int64(block_counts[row, which])
            entry, end, position = own_entries(ids, count_of_list, block_lengths, starts[index], first, last)
            for n in range(queries):
                query, lane = q[row, n // group, head, n % group], n % tile_columns
                for d in range(k_dim):
                    transposed_q[n // tile_columns, d * tile_columns + lane] = query[d] * factor
            most[:], totals[:], sums[:] = -np.inf, 0, 0
            base = starts[index + 1] - q_len
            within = np.int64(0)
            while entry < end:
                filled = np.int64(0)
                while entry < end and filled < tokens:
                    block = np.int64(block_ids[row, which, entry])
                    count = np.int64(block_lengths[block])
                    part = min(count - within, tokens - filled)
                    stored = (block * kv_heads + head) * block_size + within
                    decode_rows(lanes, storage, k_dim, keys, stored * k_units, part, wide_keys, filled * k_pad)
                    if offset:
                        o_at = (block * kv_heads + head) * k_dim
                        decode_rows(lanes, "float16", k_dim, key_offsets, o_at, np.int64(1), wide_offset, np.int64(0))
                        for t in range(filled, filled + part):
                            for d in range(k_dim):
                                wide_keys[t, d] += wide_offset[0, d]
                    decode_rows(
                        lanes, value_storage, v_dim, values, stored * v_units, part, wide_values, filled * v_pad
                    )
                    filled += part
                    within += part
                    if within >= count:
                        entry += 1
                        within = np.int64(0)
                following = np.int64(block_ids[row, which, min(entry, end - 1)])
                ahead = (following * kv_heads + head) * block_size + within
                column = np.int64(0)
                while column < q_pad:
                    left = (q_pad - column) // lanes
                    q_at = column // tile_columns * (k_dim * tile_columns) + column % tile_columns
                    vectors = np.int64(4 if wide and left >= 4 else 2 if left >= 2 else 1)
                    for t in range(0, filled, height):
                        if column == 0:
                            prefetch(keys, (ahead + t) * k_units, height * k_units)
                            prefetch(values, (ahead + t) * v_units, height * v_units)
                        if wide and vectors == 4:
                            multiply_tile(
                                lanes, height, 4, 0, wide_keys, t * k_pad, k_pad, 1, k_dim,
                                transposed_q, q_at, tile_columns, scores, t * tile_columns, tile_columns,
                            )  # fmt: skip
                        elif vectors == 2:
                            multiply_tile(
                                lanes, height, 2, 0, wide_keys, t * k_pad, k_pad, 1, k_dim,
                                transposed_q, q_at, tile_columns, scores, t * tile_columns, tile_columns,
                            )  # fmt: skip
                        else:
                            multiply_tile(
                                lanes, height, 1, 0, wide_keys, t * k_pad, k_pad, 1, k_dim,
                                transposed_q, q_at, tile_columns, scores, t * tile_columns, tile_columns,
                            )  # fmt: skip
                    stop = min(column + vectors * lanes, queries)
                    if softcapped:
                        for t in range(filled):
                            row_softcap(scores, t, stop - column, np.float32(softcap) * LOG2_E)
                    # Query n sees the tokens up to base + n // group.
                    if position + filled > base + column // group + 1:
                        for n in range(column, stop):
                            for t in range(max(0, base + n // group + 1 - position), filled):
                                scores[t, n - column] = MASKED
                    for each in range(vectors):
                        at = column + each * lanes
                        if rows_most(lanes, lanes, scores, each * lanes, tile_columns, filled, most, at, fresh, at):
                            for n in range(at, at + lanes):
                                rescale = exp2(most[n] - fresh[n])
                                most[n] = fresh[n]
                                totals[n] *= rescale
                                for d in range(v_pad):
                                    sums[n, d] *= rescale
                        rows_exp2(lanes, scores, each * lanes, tile_columns, filled, most, at, totals, at)
                    for n in range(0, vectors * lanes, height):
                        for d in range(0, v_full, tile_columns):
                            multiply_tile(
                                lanes, height, most_vectors, 1, scores, n, 1, tile_columns, filled,
                                wide_values, d, v_pad, sums, (column + n) * v_pad + d, v_pad,
                            )  # fmt: skip
                        if v_rest > 0:
                            multiply_tile(
                                lanes, height, v_rest, 1, scores, n, 1, tile_columns, filled,
                                wide_values, v_full, v_pad, sums, (column + n) * v_pad + v_full, v_pad,
                            )  # fmt: skip
                    column += vectors * lanes
                position += filled
            edge = 2 * thread + (0 if starts[index] < first else 1)
            whole = starts[index] >= first and starts[index + 1] <= last
            keep_part(
                index, edge, whole, q_pad, q_pad, most[None, :], totals[None, :], sums, edges,
                edge_sums, edge_most, edge_total, out, lse,
            )  # fmt: skip
        return np.int64(0 * code_version)

    return attend
