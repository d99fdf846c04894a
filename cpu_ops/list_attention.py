"""Attention over lists of blocks: what its kernels have in common, whatever a thread does with its share.

Work is divided among threads by tokens, across sequences, heads and blocks alike, and the partial results of a list
that several threads shared are merged by their log-sum-exps, which is exact (as in Flash-Decoding).
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
"""Status: a list holds fewer tokens than it must."""


def _arrays(numbers: str) -> tuple[Any, ...]:
    """q, keys, values, key_offsets, block_ids, block_counts, block_lengths."""
    int3, int2, int1 = (types.Array(types.int32, dims, "C") for dims in (3, 2, 1))
    return types.Array(types.float32, 5, "C"), *pool_arrays(numbers), OFFSETS, int3, int2, int1


OFFSETS = types.Array(types.uint16, 3, "C")
"""Bits of float16: what was taken off the keys of each block and kv head (`attention.attend_blocks`)."""
_OUT, _LSE = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")


@region_arguments("attend lists")
def arguments(numbers: str) -> tuple[Any, ...]:
    """Of the regions, for pools whose memory kernels view as `numbers` (`storage.numbers_of`).

    (starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap, edges, edge_sums,
    edge_most, edge_total, out, lse): starts from `work_division.list_starts`; a thread's own lists go to out and lse,
    what it has of others to two edges (`work_division.merge_edges`), -1 in `edges` for none.
    """
    int1, real2 = types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C")
    factors = types.float64, types.float64
    return (int1, *_arrays(numbers), *factors, int1, _LSE, real2, real2, _OUT, _LSE)


@called_as("attend lists")
def signature(numbers: str) -> Any:
    """Of the kernels: (run, region, least, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale,
    softcap, threads, out, lse).

    run: `parallel_region.all_threads()`. region: its address. least: tokens that every list must hold. q: [rows,
    q_len, kv_heads, group, k_dim]. out: [rows, kv_heads, q_len * group, v_dim], lse without the last dimension. They
    return a status, an error's (`cpu_ops.work_division`, TOO_SHORT) where it is negative.
    """
    integer, real = types.int64, types.float64
    return types.int64(integer, integer, integer, *_arrays(numbers), real, real, integer, _OUT, _LSE)


@cache
def kernel_for(numbers: str) -> Any:
    """Compile the kernel for pools viewed as `numbers` (as `signature`), or load it from Numba's on-disk cache."""
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
        given = (
            starts, q, keys, values, key_offsets, block_ids, block_counts, block_lengths, scale, softcap,
            edges, edge_sums, edge_most, edge_total, out, lse,
        )  # fmt: skip
        run_region("attend lists", numbers, run, region, threads, given)
        merge_edges(edges, edge_sums, edge_most, edge_total, out, lse)
        return np.int64(0 * code_version)

    return attend_lists
