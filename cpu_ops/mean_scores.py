"""Scores and masses of blocks whose representatives are the mean μ of their keys and, optionally, the deviation σ.

The scores of such a block's keys have the mean q·μ and, if channels vary independently, the standard deviation
sqrt(Σ_d (q_d σ_d)²).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import tanh
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments
from hetero_kv.cpu_ops.simd import score_tile
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.tiles import tiles_for


@region_arguments("mean scores")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments: (q, representatives, block_ids, block_size, scale, softcap, likely, weights, masses).

    q: [rows, kv_heads, group, k_dim] float32. representatives: [num_blocks, kv_heads, 1 or 2, k_dim], means and
    deviations, viewed as `numbers`. block_ids: [rows, blocks] int32, in the pool. scale multiplies the scores; softcap
    c > 0 then turns them into c * tanh(score / c). The region writes three arrays [rows, kv_heads, group, blocks]
    float32: likely, scores one deviation above the mean; weights, the log-sum-exp of block_size scores equal to the
    mean's; masses, the log-sum-exp of block_size scores with this deviation (`spread_mass`).
    """
    real4, real = types.Array(types.float32, 4, "C"), types.float64
    pool, ids = types.Array(from_dtype(np.dtype(numbers)), 4, "C"), types.Array(types.int32, 2, "C")
    return real4, pool, ids, types.int64, real, real, real4, real4, real4


def region_for(q: tuple[int, ...], representatives: tuple[int, ...], dtype: np.dtype) -> int:
    """Returns the address of the region for arrays of these shapes. Raises ValueError if they do not fit together."""
    storage = storage_of(dtype)
    fitting = len(representatives) == 4 and (representatives[1], representatives[3] * storage.group) == (q[1], q[3])
    if not fitting or representatives[2] not in (1, 2):
        raise ValueError(
            f"representatives {representatives} do not fit q {q}: kv_heads (second) and k_dim (last) must be equal, "
            "and there must be 1 or 2 of a block, its mean and its deviation"
        )
    return address_of(_region(isa(), storage.name, q[2], representatives[2], q[3]))


@device_function(error_model="numpy", fastmath={"contract", "nsz"})
def spread_mass(mean, deviation, log_n):
    """Returns the expected log-sum-exp of n normally distributed scores with mean m and deviation σ, in float32.

    It is m + log n + σ²/2 up to σ² = 2 log n. For larger σ, n scores are too few for that, and the largest one
    dominates: m + σ sqrt(2 log n) (the random energy model's free energy, Derrida 1981, Phys. Rev. B 24, 2613).
    """
    most = np.sqrt(np.float32(2) * log_n)
    return mean + (log_n + np.float32(0.5) * deviation * deviation if deviation < most else deviation * most)


@device_function(error_model="numpy", fastmath={"contract", "nsz"})
def _spread(means, above, masses, scale, softcap, log_n):
    """Turn a query head's products with means and squared deviations into weights, likely and masses, in place.

    means: q·μ, becomes weights. above: Σ (q σ)², becomes likely. masses: written.
    """
    for entry in range(means.size):
        mean, deviation = means[entry] * scale, np.sqrt(above[entry]) * scale
        if softcap > 0:
            capped = softcap * tanh(mean / softcap)
            deviation = softcap * tanh((mean + deviation) / softcap) - capped
            mean = capped
        above[entry] = mean + deviation
        means[entry] = mean + log_n
        masses[entry] = spread_mass(mean, deviation, log_n)


@cache
def _region(instructions: str, storage: str, group: int, representative_num: int, k_dim: int) -> Any:
    lanes, _, tile_queries, *_ = tiles_for(instructions, group, 1)
    units = STORAGE_TYPES[storage].units(k_dim)
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        q, representatives, block_ids, block_size, scale, softcap, likely, weights, masses = arguments_at(
            "mean scores", numbers, arguments
        )
        rows, blocks = block_ids.shape
        kv_heads = q.shape[1]
        log_n = np.float32(np.log(block_size))
        tile = np.zeros((2, group), np.float32)
        first, last = rows * blocks * thread // threads, rows * blocks * (thread + 1) // threads
        # A block's representatives are contiguous over kv heads, and are read in this order.
        for item in range(first, last):
            row, entry = item // blocks, item % blocks
            r_at = np.int64(block_ids[row, entry]) * kv_heads * (representative_num * units)
            q_at = row * kv_heads * (group * k_dim)
            for head in range(kv_heads):
                score_tile(
                    lanes, "dot", storage, k_dim, group, tile_queries, 1, q, q_at, representatives, r_at, tile, 0, 1
                )
                if representative_num == 2:
                    score_tile(
                        lanes, "squares", storage, k_dim, group, tile_queries, 1, q, q_at,
                        representatives, r_at + units, tile, group, 1,
                    )  # fmt: skip
                for g in range(group):
                    weights[row, head, g, entry], likely[row, head, g, entry] = tile[0, g], tile[1, g]
                r_at += representative_num * units
                q_at += group * k_dim
        # The rest is vectorised over the blocks of each query head.
        for row in range(rows):
            start, stop = max(first - row * blocks, 0), min(last - row * blocks, blocks)
            if start >= stop:
                continue
            for of_query in range(kv_heads * group):
                place = row, of_query // group, of_query % group
                means, above = weights[place][start:stop], likely[place][start:stop]
                _spread(means, above, masses[place][start:stop], np.float32(scale), np.float32(softcap), log_n)
        return np.int64(0 * code_version)

    return score
