"""Residual attention: each unattended block counts as one token, with its mean value and its estimated mass."""

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.estimated_masses import log_sum_exp, logaddexp
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_exp2
from hetero_kv.cpu_ops.kernel_address import address_of, called_as
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.simd import accumulate_rows_at, prefetch
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.tiles import columns_apart, tiles_for

_AT_ONCE = 32
"""Blocks whose weights are collected before their mean values are added."""
_REAL4, _REAL3, _REAL2 = (types.Array(types.float32, dims, "C") for dims in (4, 3, 2))


def _input_types(numbers: str) -> tuple[Any, ...]:
    """The types of (value_means, table, counts, weights, masses, estimates)."""
    pool = types.Array(from_dtype(np.dtype(numbers)), 4, "C")
    table, counts = (types.Array(types.int32, dims, "C") for dims in (2, 1))
    return pool, table, counts, _REAL4, _REAL4, types.boolean


@region_arguments("rest")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments: (value_means, table, counts, weights, masses, estimates, parts, part_out, part_lse,
    part_mass, whole_out, whole_lse, whole_mass).

    The first six are those of the kernels (`signature`); the region writes the others. Threads divide the blocks of
    all lists, one list per row and kv head. A thread writes its result for a list that it processes alone to whole_out
    [rows, kv_heads, group, v_dim], whole_lse and whole_mass [rows, kv_heads, group]. It writes results for shared lists
    to its two parts, part_out [2 * threads, group, v_dim], part_lse and part_mass [2 * threads, group]; parts [2 *
    threads] has their lists, -1 for an unused part.
    """
    return (*_input_types(numbers), types.Array(types.int64, 1, "C"), _REAL3, _REAL2, _REAL2, _REAL4, _REAL3, _REAL3)


@called_as("rest")
def signature(numbers: str) -> Any:
    """The kernels' signature: (run, region, value_means, table, counts, weights, masses, estimates, threads, out, lse,
    total).

    They merge residual attention into the attention to attended tokens, by log-sum-exps.

    value_means: [num_blocks, kv_heads, 1, v_dim], viewed as `numbers`. table: [rows, blocks] int32, ids in the pool, of
    which each row's first counts [rows] int32 are read. weights, masses: [rows, kv_heads, group, blocks] float32,
    log-sum-exps of each block's scores; weights weight its mean value, and masses estimate the attention that it
    receives; both are -inf for an attended block. out: [rows, kv_heads, group, v_dim] float32 and lse [rows, kv_heads,
    group] float32, the attention to attended tokens, updated in place if `estimates`. total: [rows, kv_heads, group]
    float32, written: the log-sum-exp of the former lse and of the masses.
    """
    integer = types.int64
    return integer(integer, integer, *_input_types(numbers), integer, _REAL4, _REAL3, _REAL3)


def region_for(q: tuple[int, ...], v_dim: int, dtype: np.dtype) -> int:
    """Returns the address of the region for value means of this dtype and q [rows, kv_heads, group, k_dim]."""
    return address_of(_region(isa(), storage_of(dtype).name, q[2], v_dim))


@cache
def kernel_for(numbers: str) -> Any:
    """Compile the kernel for value means viewed as `numbers`, or load it from Numba's on-disk cache."""
    code_version = CODE_VERSION

    @njit(signature(numbers), cache=True, nogil=True, error_model="numpy")
    def add_rest(run, region, value_means, table, counts, weights, masses, estimates, threads, out, lse, total):
        rows, kv_heads, group, v_dim = out.shape
        parts = np.full(2 * threads, -1, np.int64)
        part_out = np.empty((2 * threads, group, v_dim), np.float32)
        part_lse, part_mass = np.empty((2 * threads, group), np.float32), np.empty((2 * threads, group), np.float32)
        whole_out = np.empty(out.shape, np.float32)
        whole_lse, whole_mass = np.full(lse.shape, -np.inf, np.float32), np.full(lse.shape, -np.inf, np.float32)
        region_args = (
            value_means, table, counts, weights, masses, estimates, parts, part_out, part_lse, part_mass,
            whole_out, whole_lse, whole_mass,
        )  # fmt: skip
        run_region("rest", numbers, run, region, threads, region_args)
        for row in range(rows):
            for head in range(kv_heads):
                for g in range(group):
                    total[row, head, g] = logaddexp(lse[row, head, g], whole_mass[row, head, g])
                    if estimates:
                        _merge(out[row, head, g], lse[row, head], g, whole_out[row, head, g], whole_lse[row, head, g])
        for part in range(parts.size):
            if parts[part] >= 0:
                row, head = parts[part] // kv_heads, parts[part] % kv_heads
                for g in range(group):
                    total[row, head, g] = logaddexp(total[row, head, g], part_mass[part, g])
                    if estimates:
                        _merge(out[row, head, g], lse[row, head], g, part_out[part, g], part_lse[part, g])
        return np.int64(0 * code_version)

    return add_rest


@device_function(error_model="numpy")
def _merge(out, lses, at, other, other_lse):
    """Merge attention `other` [v_dim] with log-sum-exp `other_lse` into out [v_dim] with log-sum-exp lses[at]."""
    if other_lse == -np.inf:
        return
    both = logaddexp(lses[at], other_lse)
    own, its = exp2((lses[at] - both) * LOG2_E), exp2((other_lse - both) * LOG2_E)
    for d in range(out.size):
        out[d] = own * out[d] + its * other[d]
    lses[at] = both


@device_function
def _keep(sums, lse, mass, sums_place, lse_place, mass_place):
    """Copy sums [group, v_dim], lse and mass [group] to their places, element by element as `step_parts.copy_into`."""
    for g in range(sums.shape[0]):
        lse_place[g], mass_place[g] = lse[g], mass[g]
        for d in range(sums.shape[1]):
            sums_place[g, d] = sums[g, d]


@cache
def _region(instructions: str, storage: str, group: int, v_dim: int) -> Any:
    tiles = tiles_for(instructions, group, 1)
    lanes, tile_queries, row_size, num_tiles = tiles.lanes, tiles.queries, tiles.row, tiles.number
    columns = columns_apart(instructions, tile_queries, v_dim)
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def estimate(thread, threads, arguments):
        (
            value_means, table, counts, weights, masses, estimates, parts, part_out, part_lse, part_mass,
            whole_out, whole_lse, whole_mass,
        ) = arguments_at("rest", numbers, arguments)  # fmt: skip
        rows, kv_heads = weights.shape[:2]
        blocks = table.shape[1]
        lists = rows * kv_heads
        first, last = lists * blocks * thread // threads, lists * blocks * (thread + 1) // threads
        sums, factors = np.empty((group, v_dim), np.float32), np.zeros((num_tiles, _AT_ONCE * row_size), np.float32)
        shares = np.empty((group, _AT_ONCE), np.float32)
        lse, mass, most = np.empty(group, np.float32), np.empty(group, np.float32), np.empty(group, np.float32)
        largest, of_rest = np.empty(_AT_ONCE, np.float32), np.empty(_AT_ONCE + 1, np.int64)
        next_rows = np.empty(_AT_ONCE, np.int64)
        for index in range(lists):
            row, head = index // kv_heads, index % kv_heads
            own = np.int64(counts[row])
            start, stop = max(first - index * blocks, 0), min(last - index * blocks, own)
            if start >= stop:
                continue
            for g in range(group):
                mass[g] = log_sum_exp(masses[row, head, g, start:stop])
                lse[g] = log_sum_exp(weights[row, head, g, start:stop]) if estimates else np.float32(-np.inf)
                most[g] = lse[g] if lse[g] > -np.inf else np.float32(0)
            sums[:] = 0
            for begin in range(start, stop if estimates else start, _AT_ONCE):
                count = min(_AT_ONCE, stop - begin)
                for g in range(group):
                    for each in range(count):
                        shares[g, each] = (weights[row, head, g, begin + each] - most[g]) * LOG2_E
                    row_exp2(shares, g, count, np.float32(0))
                # Attended blocks have weight 0 and are skipped, as mean values that were never computed may be NaN.
                largest[:count] = 0
                for g in range(group):
                    for each in range(count):
                        largest[each] = max(largest[each], shares[g, each])
                found = np.int64(0)
                for each in range(count):
                    of_rest[found] = each
                    found += largest[each] > 0
                for g in range(group):
                    tile, lane = g // tile_queries, g % tile_queries
                    for place in range(found):
                        factors[tile, place * row_size + lane] = shares[g, of_rest[place]]
                for place in range(found):
                    of_rest[place] = np.int64(table[row, begin + of_rest[place]]) * value_means.shape[1] + head
                for place in range(_AT_ONCE):
                    following = min(begin + _AT_ONCE + place, stop - 1)
                    next_rows[place] = np.int64(table[row, following]) * value_means.shape[1] + head
                    if place >= found:
                        prefetch(value_means, next_rows[place] * value_means.shape[3], value_means.shape[3])
                accumulate_rows_at(
                    lanes, storage, v_dim, group, tile_queries, row_size, columns, factors, _AT_ONCE * row_size,
                    value_means, of_rest, next_rows, found, sums,
                )  # fmt: skip
            if stop - start == own:
                _keep(sums, lse, mass, whole_out[row, head], whole_lse[row, head], whole_mass[row, head])
            else:
                part = 2 * thread + (0 if index * blocks < first else 1)
                parts[part] = index
                _keep(sums, lse, mass, part_out[part], part_lse[part], part_mass[part])
        return np.int64(0 * code_version)

    return estimate
