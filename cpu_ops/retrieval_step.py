"""A decode step's retrieval in one layer, in one call: store the token, choose the best blocks, attend to them."""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops import attention, block_choice, list_attention, scores, token_store
from hetero_kv.cpu_ops.block_groups import entry_ids
from hetero_kv.cpu_ops.chosen_blocks import attended_ids, best_blocks, blocks_in_use, in_context
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of, call_kernel
from hetero_kv.cpu_ops.parallel_region import all_threads, run_region
from hetero_kv.cpu_ops.step_parts import (
    are_ranges,
    as_rows_of_heads,
    by_head,
    contexts,
    copy_into,
    forget_behind,
    has_token,
    head_rows,
    write_numbers,
)
from hetero_kv.cpu_ops.storage import numbers_of, storage_of
from hetero_kv.cpu_ops.untyped_arrays import UNTYPED, UNTYPED_POOL, as_bytes, items_of

EVERYTHING, AS_GIVEN, CHOSEN = 0, 1, 2
"""Which blocks a step attends to: all; those at the positions passed in; those that it chooses."""
NOTHING_FORBIDDEN = np.empty((0, 0, 0), np.int32)
# From this many scores on, threads divide the lists; with fewer, one thread chooses in about 0.1 ms.
_TOGETHER = 16384
BAD_PLACE, BAD_CONTEXT, BAD_LISTS, BAD_SHAPES = -1.0, -2.0, -3.0, -4.0
REFUSALS = {
    BAD_PLACE: "the position must lie in the blocks of table, and those in the pool",
    BAD_CONTEXT: "the blocks of table must lie in the pool, and allowed positions in the context",
    BAD_LISTS: "lists of blocks, or their lengths, must lie in the pool",
    BAD_SHAPES: "q, k, v, table, positions, allowed, out and lse must have the rows, heads and dimensions that it was "
    "bound to, and no more positions be chosen than are allowed",
}


def row_ranges(rows: int, position: int, first: int, end: int) -> np.ndarray:
    """The `ranges` of `RetrievalStep` for rows of equal length: [3, rows] int64."""
    return np.repeat(np.array([[position], [first], [end]]), rows, axis=1)


class RetrievalStep:
    """The retrieval of one layer, bound to the arrays of its pool and to the shapes of its queries.

    Args:
        keys: [num_blocks, kv_heads, block_size, k_dim], values: [num_blocks, kv_heads, block_size, v_dim],
            representatives: [num_blocks, kv_heads, representative_num, k_dim], of storage types (`cpu_ops.storage`).
        lengths: [num_blocks] int32, tokens in each block.
        group: query heads of a kv head.
        score: `mode` of `cpu_ops.scores.block_scores`.
        softcapped: whether attention scores are soft-capped.
        dtype: of queries, keys, values and outputs: float32, or uint16 for the bits of bfloat16.
        threads: number of threads.
        key_offsets: as in `attention.attend_blocks`.

    Attributes:
        stores: whether calls write the token to blocks of these storage types; otherwise it must be stored before.
            Steps with key_offsets do not store.
        group, v_dim: query heads of a kv head, dimension of a value.

    Raises ValueError or TypeError for arrays that do not fit together.
    """

    def __init__(
        self, keys: np.ndarray, values: np.ndarray, representatives: np.ndarray, lengths: np.ndarray, group: int,
        score: str, softcapped: bool, dtype: Any, threads: int, key_offsets: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        storage, value_storage = storage_of(keys.dtype), storage_of(values.dtype)
        kind, numbers = storage_of(representatives.dtype), numbers_of(storage, value_storage)
        kv_heads, k_dim = keys.shape[1], keys.shape[3] * storage.group
        q, ids = (1, kv_heads, group, k_dim), (1, 1, 1)
        attend, self.v_dim = attention.region_for(
            q, keys.shape, values.shape, ids, ids[:2], lengths.shape, keys.dtype, values.dtype, softcapped,
            None if key_offsets is None else key_offsets.shape,
        )  # fmt: skip
        scored_by = scores.region_for(q, representatives.shape, ids[:2], ids[:1], representatives.dtype, score)
        self.stores = key_offsets is None and token_store.stores(keys.dtype) and token_store.stores(values.dtype)
        store = address_of(token_store.kernel_for(storage.name, value_storage.name)) if self.stores else 0
        scorer = address_of(scores.kernel_for(kind.kernel_dtype.name))
        attender = address_of(list_attention.kernel_for(numbers))
        chooser = block_choice.region()
        self._addresses = np.array([all_threads(), store, scorer, scored_by, attender, attend, chooser], np.int64)
        self._shape = np.array([group, k_dim, self.v_dim], np.int64)
        offsets = attention.NO_OFFSETS if key_offsets is None else key_offsets
        self._pool = as_bytes(keys), as_bytes(values), offsets, as_bytes(representatives), lengths
        sizes = [each.kernel_dtype.itemsize for each in (storage, value_storage, kind)]
        self._itemsizes = np.array(sizes, np.int64)
        self._kernel = _kernel(np.dtype(dtype).name)
        self._threads = threads
        self.group, self._bound = group, (dtype, softcapped)

    def fits(self, dtype: Any, softcapped: bool) -> bool:
        """Whether the step is bound to this dtype and to soft-capped scores or not."""
        return self._bound == (dtype, softcapped)

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray, which: int,
        positions: np.ndarray, allowed: np.ndarray, shared: bool, largest: bool, scale: float, softcap: float,
        out: np.ndarray, lse: np.ndarray,
    ) -> float:  # fmt: skip
        """Store one token of every row, unless its position is negative, and attend.

        q: [rows, heads, 1, k_dim], k: [rows, kv_heads, 1, k_dim], v: [rows, kv_heads, 1, v_dim] and out [rows, heads,
        1, v_dim], of the bound dtype. ranges: [3, rows] int64, of each row the position of the token in its sequence,
        and the first and the end of the blocks of its Context. table: [rows, blocks] int32, ids of each row's blocks in
        order, padded with -1. which: EVERYTHING, AS_GIVEN or CHOSEN. positions: [rows, 1 or kv_heads, count] int32, in
        the Context, ascending, padded with -1; written for CHOSEN. allowed: [rows, 1 or kv_heads, n] int32, the
        positions to score and choose from, ascending, n >= count; n = 0 allows all. shared: whether all kv heads share
        one list of positions. largest: whether a kv head's score is its group's largest instead of the mean. scale,
        softcap: as in `attention.attend_blocks`. lse: [rows, kv_heads, group] float32, written. The caller must own
        `threads.one_kernel_at_a_time`.

        Returns the largest magnitude that was stored (0 if nothing was), or infinity or NaN if one was stored. Raises
        IndexError for positions, ids and lengths outside the pool, ValueError for other shapes and TypeError for other
        types.
        """
        status = self._kernel(
            q, k, v, *self._pool, ranges, table, which, positions, allowed, shared, largest, scale, softcap,
            self._threads, self._addresses, self._shape, self._itemsizes, out, lse,
        )  # fmt: skip
        if status < 0:
            raise (ValueError if status == BAD_SHAPES else IndexError)(REFUSALS[status])
        return float(status)


@cache
def _kernel(dtype: str) -> Any:
    """Compile the kernel for queries of `dtype`; it serves pools of all storage types."""
    code_version = CODE_VERSION

    qkv = types.Array(from_dtype(np.dtype(dtype)), 4, "C")
    pool, integers = types.Array(types.uint8, 4, "C"), types.Array(types.int64, 1, "C")
    int3, int2, int1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
    signature = types.float64(
        qkv, qkv, qkv, pool, pool, list_attention.OFFSETS, pool, int1, types.Array(types.int64, 2, "C"), int2,
        types.int64, int3, int3, types.boolean, types.boolean, types.float64, types.float64,
        types.int64, integers, integers, integers, qkv,
        types.Array(types.float32, 3, "C"),
    )  # fmt: skip

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def step(
        q, k, v, keys, values, key_offsets, representatives, lengths, ranges, table, which, positions, allowed, shared,
        largest, scale, softcap, threads, addresses, shape, itemsizes, out, lse,
    ):  # fmt: skip
        keys, values = items_of(keys, itemsizes[0]), items_of(values, itemsizes[1])
        representatives = items_of(representatives, itemsizes[2])
        rows, kv_heads = q.shape[0], keys.shape[1]
        group, k_dim, v_dim = shape[0], shape[1], shape[2]
        heads = kv_heads * group
        if (
            q.shape != (rows, heads, 1, k_dim)
            or out.shape != (rows, heads, 1, v_dim)
            or lse.shape != (rows, kv_heads, group)
            or table.shape[0] != rows
            or ranges.shape != (3, rows)
            or (has_token(ranges) and (k.shape != (rows, kv_heads, 1, k_dim) or v.shape != (rows, kv_heads, 1, v_dim)))
            or (which != EVERYTHING and (positions.shape[0] != rows or positions.shape[1] not in (1, kv_heads)))
            or (which == CHOSEN and allowed.shape[2] > 0 and allowed.shape[:2] != positions.shape[:2])
            or (which == CHOSEN and allowed.shape[2] > 0 and allowed.shape[2] < positions.shape[2])
        ):
            return BAD_SHAPES
        stored = np.float64(0 * code_version)
        if has_token(ranges):
            store_args = as_rows_of_heads(k), as_rows_of_heads(v), keys, values, table, ranges[0]
            stored = np.float64(call_kernel("store", UNTYPED_POOL, addresses[1], store_args))
            if stored < 0:
                return BAD_PLACE
        queries = as_rows_of_heads(q).reshape(rows, kv_heads, group, k_dim)
        if which == EVERYTHING:
            ids, in_use = table.copy().reshape(rows, 1, table.shape[1]), blocks_in_use(table)
        else:
            firsts, ends = ranges[1], ranges[2]
            if not are_ranges(firsts, ends, blocks_in_use(table)):
                return BAD_CONTEXT
            if which == CHOSEN:
                (context, counts), candidates = contexts(table, firsts, ends), allowed.shape[2]
                for row in range(rows):
                    for each in allowed[row].flat:
                        if each < 0 or each >= counts[row]:
                            return BAD_CONTEXT
                among = candidates if candidates > 0 else context.shape[1]
                block_scores = np.empty((rows, kv_heads, group, among), np.float32)
                scoring = addresses[0], addresses[3], queries, representatives, context, counts, threads, block_scores
                if candidates > 0:
                    # Candidates may differ between kv heads, so that arrays have one row per block and kv head.
                    entries, every = entry_ids(context, allowed, kv_heads), np.full(rows * kv_heads, among, np.int32)
                    by_row = queries.reshape(rows * kv_heads, 1, group, k_dim)
                    scoring = (
                        addresses[0], addresses[3], by_row, by_head(representatives), entries, every, threads,
                        head_rows(block_scores),
                    )  # fmt: skip
                if call_kernel("score", UNTYPED, addresses[2], scoring) < 0:
                    return BAD_CONTEXT
                if rows * kv_heads * among < _TOGETHER:
                    copy_into(best_blocks(block_scores, positions.shape[2], allowed, shared, largest), positions)
                else:
                    zeros, unrestricted = np.zeros((rows, kv_heads, group), np.float32), allowed[:, :, :0].copy()
                    choose_args = (
                        block_scores, block_scores, False, zeros, zeros, unrestricted, shared, np.int64(largest), 0.0,
                        np.int64(0), np.int64(positions.shape[2]), np.int64(1), positions,
                    )  # fmt: skip
                    run_region("choose", "", addresses[0], addresses[6], threads, choose_args)
                    if candidates > 0:
                        in_context(positions, allowed)
                forget_behind(positions, counts)
            ids, in_use = attended_ids(table, positions, firsts, ends)
        attended = np.empty((rows, kv_heads, group, v_dim), np.float32)
        queries_5d = queries.reshape(rows, 1, kv_heads, group, k_dim)
        attend_args = (
            addresses[0], addresses[5], np.int64(0), queries_5d, keys, values, key_offsets, ids, in_use, lengths, scale,
            softcap, threads, attended, lse,
        )  # fmt: skip
        if call_kernel("attend lists", UNTYPED_POOL, addresses[4], attend_args) < 0:
            return BAD_LISTS
        write_numbers(attended.reshape(rows, heads, v_dim), out)
        return stored

    return step
