"""The attention that candidates receive, from the scores of their keys: as they are stored, or from coarse copies."""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.estimated_masses import log_sum_exp
from cpu_ops.exponential import tanh
from cpu_ops.simd import score_tile
from cpu_ops.storage import STORAGE_TYPES, storage_of
from cpu_ops.tiles import tiles_for


def candidate_masses(
    q: np.ndarray, keys: np.ndarray, means: np.ndarray | None, table: np.ndarray, positions: np.ndarray,
    scale: float, softcap: float, log_masses: np.ndarray,
) -> None:  # fmt: skip
    """Write the log-sum-exp of the scores of all keys of each candidate, for every query head.

    q: [rows, kv_heads, group, k_dim] float32. keys: [num_blocks, kv_heads, block_size, k_dim] of a storage type, or how
    they differ from `means` [num_blocks, kv_heads, 1 or more, k_dim], of which the first of a block counts.
    table: [rows, blocks] int32 ids of full blocks. positions: [rows, 1 or kv_heads, n] int32, the candidates among
    those; entries below 0 are none. scale, softcap: as `attention.attend_blocks`. log_masses: [rows, kv_heads, group,
    blocks] float32, written at the candidates' positions.

    Raises ValueError or TypeError for arrays that do not fit together, IndexError for ids or positions that point
    outside of them.
    """
    storage, kind = storage_of(keys.dtype), storage_of(keys.dtype if means is None else means.dtype)
    _, kv_heads, group, k_dim = q.shape
    beside = keys if means is None else means
    fitting = keys.shape[1] == beside.shape[1] == kv_heads and keys.shape[0] == beside.shape[0]
    if not fitting or {keys.shape[3] * storage.group, beside.shape[3] * kind.group} != {k_dim}:
        raise ValueError(f"keys {keys.shape} and means {beside.shape} do not fit q {q.shape}: kv_heads and k_dim")
    if positions.shape[:1] != table.shape[:1] or log_masses.shape != (*q.shape[:3], table.shape[1]):
        raise ValueError(
            f"positions {positions.shape} and log_masses {log_masses.shape} do not fit table {table.shape}"
        )
    kernel = _kernel(isa(), storage.name, kind.name, means is not None, group, k_dim, keys.shape[2])
    arrays = keys.view(storage.kernel_dtype), beside.view(kind.kernel_dtype)
    if kernel(q, *arrays, table, positions, scale, softcap, log_masses) < 0:
        raise IndexError(f"positions must lie in 0..{table.shape[1] - 1}, and what they name in the pool")


def signature(storage: str, kind: str) -> Any:
    """Of the kernels: (q, keys, means, table, positions, scale, softcap, log_masses) to a status, < 0 an error's."""
    pool, means = (types.Array(from_dtype(STORAGE_TYPES[name].kernel_dtype), 4, "C") for name in (storage, kind))
    real4 = types.Array(types.float32, 4, "C")
    int3, int2 = (types.Array(types.int32, dims, "C") for dims in (3, 2))
    return types.int64(real4, pool, means, int2, int3, types.float64, types.float64, real4)


@cache
def _kernel(instructions: str, storage: str, kind: str, differ: bool, group: int, k_dim: int, block_size: int) -> Any:
    lanes, full_tiles, tile_queries, rest_queries, *_ = tiles_for(instructions, group, 1)
    full_queries = full_tiles * tile_queries
    units, mean_units = STORAGE_TYPES[storage].units(k_dim), STORAGE_TYPES[kind].units(k_dim)
    code_version = CODE_VERSION

    @njit(signature(storage, kind), cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def masses(q, keys, means, table, positions, scale, softcap, log_masses):
        rows, kv_heads = q.shape[:2]
        lists, candidates = positions.shape[1:]
        # A column more for what the mean scores.
        scores = np.zeros((group, block_size + 1), np.float32)
        width = block_size + 1
        for item in range(rows * kv_heads * candidates):
            place, index = item % candidates, item // candidates
            row, head = index // kv_heads, index % kv_heads
            position = positions[row, min(head, lists - 1), place]
            if position < 0:
                continue
            if position >= table.shape[1] or table[row, position] < 0 or table[row, position] >= keys.shape[0]:
                return np.int64(-1)
            block, q_at = np.int64(table[row, position]), index * (group * k_dim)
            k_at = (block * kv_heads + head) * (block_size * units)
            m_at = (block * kv_heads + head) * (means.shape[2] * mean_units)
            for g in range(0, full_queries, tile_queries):
                for t in range(block_size):
                    score_tile(
                        lanes, "dot", storage, k_dim, tile_queries, q, q_at + g * k_dim, keys, k_at + t * units,
                        scores, g * width + t, width,
                    )  # fmt: skip
                if differ:
                    score_tile(
                        lanes, "dot", kind, k_dim, tile_queries, q, q_at + g * k_dim, means, m_at,
                        scores, g * width + block_size, width,
                    )  # fmt: skip
            if rest_queries > 0:
                for t in range(block_size):
                    score_tile(
                        lanes, "dot", storage, k_dim, rest_queries, q, q_at + full_queries * k_dim,
                        keys, k_at + t * units, scores, full_queries * width + t, width,
                    )  # fmt: skip
                if differ:
                    score_tile(
                        lanes, "dot", kind, k_dim, rest_queries, q, q_at + full_queries * k_dim,
                        means, m_at, scores, full_queries * width + block_size, width,
                    )  # fmt: skip
            for g in range(group):
                for t in range(block_size):
                    score = (scores[g, t] + scores[g, block_size]) * np.float32(scale)
                    scores[g, t] = np.float32(softcap) * tanh(score / np.float32(softcap)) if softcap > 0 else score
                log_masses[row, head, g, position] = log_sum_exp(scores[g, :block_size])
        return np.int64(0 * code_version)

    return masses
