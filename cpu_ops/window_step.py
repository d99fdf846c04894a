"""A decoded token's attention to a window of the newest tokens, and learned sinks, as kernels that can be queued.

The window is contiguous per head (`cpu_ops.contiguous_decode`). A learned sink is a key with a score of its own and a
value of zero (gpt-oss): with it, attention has exp(lse) / (exp(lse) + exp(sink)) of its weight.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.contiguous_decode import attend_region
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.work_division import edge_buffers, merge_edges

_STORED = {"float32": "float32", "uint16": "bfloat16"}
_REAL1, _REAL3 = types.Array(types.float32, 1, "C"), types.Array(types.float32, 3, "C")


def window_region(dtype: str, group: int, k_dim: int, v_dim: int) -> int:
    """Returns the address of the region that attends to windows of `dtype`, a key of `NUMBERS`."""
    return address_of(attend_region(isa(), _STORED[dtype], group, k_dim, v_dim))


@device_function
def _weight(lse, sink):
    """Returns the share of attention beside a sink; 0 for attention to nothing."""
    return np.float32(1) / (np.float32(1) + np.exp(sink - lse))


@cache
def window_step(dtype: str) -> Any:
    """Returns the kernel that stores a token's key and value, and attends to the window that ends with it.

    (run, region, q, k, v, keys, values, start, end, scale, softcap, sink, out, threads)

    run: `parallel_region.all_threads()`. region: from `window_region`. q, out: [rows, heads, 1, dim], k, v: [rows,
    kv_heads, 1, dim], keys, values: [rows, kv_heads, capacity, dim], all of `dtype`, float32 or the bits of bfloat16,
    C-contiguous. start, end: of the window in keys and values; the token goes to end - 1. scale, softcap: as in
    `cpu_ops.attention.attend_blocks`. sink: [heads] float32, scores of learned sinks; empty for none. out is written.
    """
    code_version, integer = CODE_VERSION, types.int64
    array = types.Array(NUMBERS[dtype], 4, "C")
    factors = types.float64, types.float64
    signature = types.void(
        integer, integer, array, array, array, array, array, integer, integer, *factors, _REAL1, array, integer
    )

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def step(run, region, q, k, v, keys, values, start, end, scale, softcap, sink, out, threads):
        rows, heads, kv_heads, k_dim, v_dim = q.shape[0], q.shape[1], keys.shape[1], q.shape[3], out.shape[3]
        group = heads // kv_heads
        for row in range(rows):
            for head in range(kv_heads):
                for d in range(k_dim):
                    keys[row, head, end - 1, d] = k[row, head, 0, d]
                for d in range(v_dim):
                    values[row, head, end - 1, d] = v[row, head, 0, d]
        queries = np.empty((rows, kv_heads, group, k_dim), np.float32)
        for row in range(rows):
            for head in range(heads):
                for d in range(k_dim):
                    queries[row, head // group, head % group, d] = number(q[row, head, 0, d])
        attended = np.empty((rows, kv_heads, group, v_dim), np.float32)
        lse = np.empty((rows, kv_heads, group), np.float32)
        edges, edge_sums, edge_most, edge_total = edge_buffers(threads, group, v_dim)
        nothing = np.int64(0 * code_version)
        region_args = (
            queries, keys, values, keys, values, start, end - start, nothing, nothing, scale, softcap,
            edges, edge_sums, edge_most, edge_total, attended, lse,
        )  # fmt: skip
        run_region("attend ranges", dtype, run, region, threads, region_args)
        merge_edges(edges, edge_sums, edge_most, edge_total, attended, lse)
        for row in range(rows):
            for head in range(heads):
                weight = np.float32(1)
                if sink.size:
                    weight = _weight(lse[row, head // group, head % group], sink[head])
                for d in range(v_dim):
                    out[row, head, 0, d] = rounded(out, attended[row, head // group, head % group, d] * weight)

    return step


@cache
def sink_step(dtype: str) -> Any:
    """Returns the kernel that adds learned sinks to the softmax of attention which lacks them.

    (out, lse, sink)

    out: [rows, heads, 1, dim] of `dtype`, overwritten. lse: [rows, kv_heads, group] float32, of the attention so far.
    sink: [heads] float32.
    """
    code_version = CODE_VERSION

    @njit(types.void(types.Array(NUMBERS[dtype], 4, "C"), _REAL3, _REAL1), cache=True, nogil=True)
    def add(out, lse, sink):
        rows, heads, _, dim = out.shape
        group = lse.shape[2]
        for row in range(rows):
            for head in range(heads):
                weight = _weight(lse[row, head // group, head % group], sink[head]) + np.float32(0 * code_version)
                for d in range(dim):
                    out[row, head, 0, d] = rounded(out, number(out[row, head, 0, d]) * weight)

    return add
