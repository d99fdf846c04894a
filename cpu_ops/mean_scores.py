"""Scores of blocks whose representatives are the mean of their keys and, where there are two, their deviation.

The keys of such a block score q·μ on average, and q·μ + sqrt(Σ_d (q_d σ_d)²) one standard deviation above, where
channels vary independently of each other.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.exponential import tanh
from cpu_ops.simd import score_tile
from cpu_ops.storage import STORAGE_TYPES, storage_of
from cpu_ops.tiles import tiles_for


def mean_scores(
    q: np.ndarray, representatives: np.ndarray, block_ids: np.ndarray, scale: float, softcap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Score every listed block for every query head, scaled and capped as attention's scores are.

    q: [rows, kv_heads, group, k_dim] float32. representatives: [num_blocks, kv_heads, 1 or 2, k_dim] of a storage type,
    means and deviations. block_ids: [rows, blocks] int32. scale multiplies the scores; softcap c > 0 then turns them
    into c * tanh(score / c).

    Returns the scores of the means and those one standard deviation above, [rows, kv_heads, group, blocks] float32
    each; both are one array where there is one representative. Raises ValueError or TypeError for arrays that do not
    fit together, IndexError for ids outside the pool.
    """
    storage = storage_of(representatives.dtype)
    kernel = kernel_for(q.shape, representatives.shape, block_ids.shape, storage.name)
    means = np.empty((*q.shape[:3], block_ids.shape[1]), np.float32)
    likely = np.empty_like(means) if representatives.shape[2] == 2 else means
    if kernel(q, representatives.view(storage.kernel_dtype), block_ids, scale, softcap, means, likely) < 0:
        raise IndexError(f"block_ids must lie in 0..{representatives.shape[0] - 1}")
    return means, likely


def kernel_for(q: tuple[int, ...], representatives: tuple[int, ...], ids: tuple[int, ...], storage: str) -> Any:
    """The kernel of `signature` for arrays of these shapes (`mean_scores`). Raises ValueError where they do not fit."""
    fitting = len(q) == 4 and len(representatives) == 4 and representatives[1::2] == (q[1], q[3])
    if not fitting or representatives[2] not in (1, 2) or min(q[2], q[3]) < 1:
        raise ValueError(
            f"representatives {representatives} do not fit q {q}: kv_heads (second) and k_dim (last) must be equal, "
            "and there must be 1 or 2 of a block, its mean and its deviation"
        )
    if len(ids) != 2 or ids[0] != q[0]:
        raise ValueError(f"block_ids {ids} must be [{q[0]}, blocks]")
    return _kernel(isa(), storage, q[2], representatives[2], q[3])


def signature(storage: str) -> Any:
    """Of the kernels: (q, representatives, block_ids, scale, softcap, means, likely) to a status, < 0 an error's."""
    pool = types.Array(from_dtype(STORAGE_TYPES[storage].kernel_dtype), 4, "C")
    real4, int2 = types.Array(types.float32, 4, "C"), types.Array(types.int32, 2, "C")
    return types.int64(real4, pool, int2, types.float64, types.float64, real4, real4)


@cache
def _kernel(instructions: str, storage: str, group: int, representative_num: int, k_dim: int) -> Any:
    lanes, full_tiles, tile_queries, rest_queries, *_ = tiles_for(instructions, group, 1)
    full_queries = full_tiles * tile_queries
    units = STORAGE_TYPES[storage].units(k_dim)
    code_version = CODE_VERSION

    @njit(signature(storage), cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(q, representatives, block_ids, scale, softcap, means, likely):
        rows, blocks = block_ids.shape
        kv_heads = q.shape[1]
        tile = np.empty((2, group), np.float32)
        for row in range(rows):
            for entry in range(blocks):
                if block_ids[row, entry] < 0 or block_ids[row, entry] >= representatives.shape[0]:
                    return np.int64(-1)
        for item in range(rows * kv_heads * blocks):
            entry, index = item % blocks, item // blocks
            row, head = index // kv_heads, index % kv_heads
            q_at = index * (group * k_dim)
            r_at = (np.int64(block_ids[row, entry]) * kv_heads + head) * (representative_num * units)
            for g in range(0, full_queries, tile_queries):
                score_tile(
                    lanes, "dot", storage, k_dim, tile_queries, q, q_at + g * k_dim, representatives, r_at, tile, g, 1
                )
                if representative_num == 2:
                    score_tile(
                        lanes, "squares", storage, k_dim, tile_queries, q, q_at + g * k_dim,
                        representatives, r_at + units, tile, group + g, 1,
                    )  # fmt: skip
            if rest_queries > 0:
                score_tile(
                    lanes, "dot", storage, k_dim, rest_queries, q, q_at + full_queries * k_dim,
                    representatives, r_at, tile, full_queries, 1,
                )  # fmt: skip
                if representative_num == 2:
                    score_tile(
                        lanes, "squares", storage, k_dim, rest_queries, q, q_at + full_queries * k_dim,
                        representatives, r_at + units, tile, group + full_queries, 1,
                    )  # fmt: skip
            for g in range(group):
                mean = tile[0, g]
                means[row, head, g, entry] = _capped(mean * np.float32(scale), softcap)
                if representative_num == 2:
                    above = mean + np.sqrt(tile[1, g])
                    likely[row, head, g, entry] = _capped(above * np.float32(scale), softcap)
        return np.int64(0 * code_version)

    return score


@njit
def _capped(score, softcap):
    """A score under a soft cap, where there is one."""
    return np.float32(softcap) * tanh(score / np.float32(softcap)) if softcap > 0 else score
