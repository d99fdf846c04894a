"""Attention over lists of blocks: the common part of its kernels, which divide work and merge partial results.

Threads divide the work by tokens, across sequences, heads and blocks. Partial results of a list that several threads
share are merged by their log-sum-exps, which is exact (as in Flash-Decoding).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.kernel_address import called_as
from cpu_ops.parallel_region import region_arguments, run_region
from cpu_ops.storage import pool_arrays
from cpu_ops.work_division import list_starts, merge_edges

TOO_SHORT = -4
"""Status: a list has fewer tokens than required."""


def _arrays(numbers: str) -> tuple[Any, ...]:
    """The types of (q, keys, values, key_offsets, block_ids, block_counts, block_lengths)."""
    int3, int2, int1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
    return types.Array(types.float32, 5, "C"), *pool_arrays(numbers), OFFSETS, int3, int2, int1


OFFSETS = types.Array(types.uint16, 3, "C")
"""Bits of float16, subtracted from the keys of each block and kv head (`attention.attend_blocks`)."""
_OUT, _LSE = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")


@region_arguments("attend lists")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments, for pools whose memory kernels view as `numbers` (`storage.numbers_of`).

    (starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap, edges, edge_sums,
    edge_most, edge_total, out, lse): starts from `work_division.list_starts`. A thread writes lists that it computes
    alone to out and lse, and partial results of shared lists to its two edges (`work_division.merge_edges`); `edges`
    is -1 for an unused edge.
    """
    int1, real2 = types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C")
    factors = types.float64, types.float64
    return (int1, *_arrays(numbers), *factors, int1, _LSE, real2, real2, _OUT, _LSE)


@called_as("attend lists")
def signature(numbers: str) -> Any:
    """The kernels' signature: (run, region, least, q, keys, values, key_offsets, block_ids, block_counts,
    block_lengths, scale, softcap, threads, out, lse).

    run: `parallel_region.all_threads()`. region: its address. least: tokens that every list must have. q: [rows, q_len,
    kv_heads, group, k_dim]. out: [rows, kv_heads, q_len * group, v_dim]; lse: the same without the last dimension.
    Returns a status; a negative one reports an error (`cpu_ops.work_division`, TOO_SHORT).
    """
    integer, real = types.int64, types.float64
    return types.int64(integer, integer, integer, *_arrays(numbers), real, real, integer, _OUT, _LSE)


@cache
def kernel_for(numbers: str) -> Any:
    """Compile the kernel for pools viewed as `numbers` (as in `signature`), or load it from Numba's on-disk cache."""
    code_version = CODE_VERSION

    @njit(signature(numbers), cache=True, nogil=True, error_model="numpy")
    def attend_lists(
        run, region, least, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
        threads, out, lse,
    ):  # fmt: skip
        starts = list_starts(block_ids, block_counts, block_lengths, q.shape[2], keys.shape[2])
        if starts[0] < 0:
            return starts[0]
        if least > 0:
            for index in range(starts.size - 1):
                if starts[index + 1] - starts[index] < least:
                    return np.int64(TOO_SHORT)
        queries, v_dim = out.shape[2:]
        edges = np.full(2 * threads, -1, np.int64)
        edge_sums = np.empty((2 * threads, queries, v_dim), np.float32)
        edge_most = np.empty((2 * threads, queries), np.float32)
        edge_total = np.empty((2 * threads, queries), np.float32)
        region_args = (
            starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        )  # fmt: skip
        run_region("attend lists", numbers, run, region, threads, region_args)
        merge_edges(edges, edge_sums, edge_most, edge_total, out, lse)
        return np.int64(0 * code_version)

    return attend_lists
