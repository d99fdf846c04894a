"""Attention to blocks of which only the mean value and an estimated mass are known: a block as one token."""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.exponential import LN_2, LOG2_E, exp2
from cpu_ops.simd import accumulate_rows
from cpu_ops.storage import STORAGE_TYPES, storage_of
from cpu_ops.tiles import tiles_for


def add_estimates(
    value_means: np.ndarray, table: np.ndarray, log_masses: np.ndarray, out: np.ndarray, lse: np.ndarray
) -> None:
    """Merge what the rest of a context is estimated to give into attention to other tokens, by their log-sum-exps.

    value_means: [num_blocks, kv_heads, 1, v_dim] of a storage type. table: [rows, blocks] int32 ids. log_masses: [rows,
    kv_heads, group, blocks] float32, the log-sum-exp of each block's scores; -inf for a block that is not estimated.
    out: [rows, kv_heads, group, v_dim] float32 and lse [rows, kv_heads, group] float32, attention to the others, are
    written over.

    Raises ValueError or TypeError for arrays that do not fit together, IndexError for ids outside the pool.
    """
    storage = storage_of(value_means.dtype)
    kernel = kernel_for(value_means.shape, table.shape, log_masses.shape, out.shape, storage.name)
    if kernel(value_means.view(storage.kernel_dtype), table, log_masses, out, lse) < 0:
        raise IndexError(f"ids in table must lie in 0..{value_means.shape[0] - 1}")


def kernel_for(
    value_means: tuple[int, ...],
    table: tuple[int, ...],
    log_masses: tuple[int, ...],
    out: tuple[int, ...],
    storage: str,
) -> Any:
    """The kernel of `signature` for arrays of these shapes (`add_estimates`). Raises ValueError where wrong."""
    v_dim = value_means[3] * STORAGE_TYPES[storage].group
    if value_means[1:3] != (out[1], 1) or v_dim != out[3] or log_masses != (*out[:3], table[1]) or table[0] != out[0]:
        raise ValueError(
            f"value_means {value_means}, table {table}, log_masses {log_masses} and out {out} do not fit each other"
        )
    return _kernel(isa(), storage, out[2], v_dim)


def signature(storage: str) -> Any:
    """Of the kernels: (value_means, table, log_masses, out, lse) to a status, an error's below 0."""
    pool = types.Array(from_dtype(STORAGE_TYPES[storage].kernel_dtype), 4, "C")
    real4, real3 = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")
    return types.int64(pool, types.Array(types.int32, 2, "C"), real4, real4, real3)


@cache
def _kernel(instructions: str, storage: str, group: int, v_dim: int) -> Any:
    lanes, full_tiles, tile_queries, rest_queries, row_size, _, columns = tiles_for(instructions, group, 1)
    full_queries, num_tiles = full_tiles * tile_queries, full_tiles + (rest_queries > 0)
    units = STORAGE_TYPES[storage].units(v_dim)
    code_version = CODE_VERSION

    @njit(signature(storage), cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def add(value_means, table, log_masses, out, lse):
        rows, kv_heads = out.shape[:2]
        blocks = table.shape[1]
        for row in range(rows):
            for entry in range(blocks):
                if table[row, entry] < 0 or table[row, entry] >= value_means.shape[0]:
                    return np.int64(-1)
        sums, weights = np.empty((group, v_dim), np.float32), np.zeros((num_tiles, row_size), np.float32)
        most, total = np.empty(group, np.float32), np.empty(group, np.float64)
        for index in range(rows * kv_heads):
            row, head = index // kv_heads, index % kv_heads
            for g in range(group):
                most[g] = lse[row, head, g]
                for entry in range(blocks):
                    most[g] = max(most[g], log_masses[row, head, g, entry])
                # What has been attended to is one more token, of its own weight.
                own = exp2((lse[row, head, g] - most[g]) * LOG2_E) if most[g] > -np.inf else np.float32(0)
                total[g] = own
                for d in range(v_dim):
                    sums[g, d] = own * out[row, head, g, d]
            for entry in range(blocks):
                any_weight = np.float32(0)
                for g in range(group):
                    mass = log_masses[row, head, g, entry]
                    weight = exp2((mass - most[g]) * LOG2_E) if mass > -np.inf else np.float32(0)
                    weights[g // tile_queries, g % tile_queries] = weight
                    total[g] += weight
                    any_weight = max(any_weight, weight)
                if any_weight == 0:
                    continue
                v_at = (np.int64(table[row, entry]) * kv_heads + head) * units
                for tile in range(full_tiles):
                    accumulate_rows(
                        lanes, storage, v_dim, tile_queries, row_size, columns, weights, tile * row_size,
                        value_means, v_at, 1, sums, tile * (tile_queries * v_dim), value_means, v_at, 0,
                    )  # fmt: skip
                if rest_queries > 0:
                    accumulate_rows(
                        lanes, storage, v_dim, rest_queries, row_size, columns, weights, full_tiles * row_size,
                        value_means, v_at, 1, sums, full_queries * v_dim, value_means, v_at, 0,
                    )  # fmt: skip
            for g in range(group):
                if total[g] > 0:
                    lse[row, head, g] = most[g] + np.float32(np.log2(total[g])) * LN_2
                    for d in range(v_dim):
                        out[row, head, g, d] = sums[g, d] / np.float32(total[g])
        return np.int64(0 * code_version)

    return add
