"""Slots for chosen chunks: a chunk that is already in a slot stays; others replace the chunks no longer chosen.

Keys are rebuilt from their low-rank factors and rotated. Values are read from blocks in DRAM (ShadowKV,
arXiv:2410.21465, algorithm 2).
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.matrix_tiles import decode_numbers
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import accumulate_rows
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.threads import on_threads
from hetero_kv.cpu_ops.tiles import tiles_for
from hetero_kv.cpu_ops.token_store import as_bfloat16, as_float16


class KeyFactorArrays(NamedTuple):
    """The low-rank factors and rotations from which keys are rebuilt.

    Attributes:
        coefficients: [rows, tokens, rank], of the unrotated keys of all heads; at least as many tokens as the chunks.
        basis: [rows, kv_heads, rank, k_dim].
        cos, sin: [positions, pairs], for at least the chunks' positions.
        pairs, offset, interleaved: as in `gpu_ops.rotary.RotaryLayout`.
    """

    coefficients: np.ndarray
    basis: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    pairs: int
    offset: int
    interleaved: bool


def hold_chunks(
    chosen: np.ndarray,
    ids: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    factors: KeyFactorArrays,
    table: np.ndarray,
    stored: np.ndarray,
    chunks: int,
    threads: int | None = None,
) -> int:
    """Put the chosen chunks into slots, in any order; ids, keys and values are updated in place.

    chosen: [rows, kv_heads, n] int64, distinct within a head. ids: [rows, kv_heads, n] int64, the chunk in each slot,
    -1 for an empty slot. keys: [rows, kv_heads, m > n, chunk_size, k_dim], values: [..., v_dim], of the same ungrouped
    storage type as the factors. The slots are m - 1 - n .. m - 2 of these; the last index is not a slot.
    table: [rows, blocks] int32, the block of every chunk. stored: [num_blocks, kv_heads, chunk_size, v_dim] values of
    a storage type (the last dimension counts records for grouped types). chunks: ids are below it.
    threads: number of threads (None: Numba's setting).

    Returns how many chosen chunks already were in slots, over all heads. Raises ValueError or TypeError for arrays that
    do not fit together, IndexError for chunks or blocks out of range; nothing is written then.
    """
    coefficients, basis, cos, sin, pairs, offset, interleaved = factors
    kernel, region, dtype, stored_dtype = _plan(
        chosen.shape, ids.shape, keys.shape, values.shape, coefficients.shape, basis.shape, cos.shape, sin.shape,
        table.shape[:1], stored.shape, keys.dtype, stored.dtype, pairs, offset, isa(),
    )  # fmt: skip
    own = (each.view(dtype) for each in (keys, values, coefficients, basis, cos, sin))
    # A pair's first channel is `offset + pair * step`; its second channel is `second` further.
    step, second = (2, 1) if interleaved else (1, pairs)
    arrays = (chosen, ids, *own, table, stored.view(stored_dtype))
    hits = on_threads(threads, kernel, all_threads(), region, *arrays, chunks, offset, step, second)
    if hits < 0:
        raise IndexError(
            f"chosen chunks and slots must be below {chunks} and have blocks (0..{len(stored) - 1}), coefficients "
            f"({coefficients.shape[1]} tokens) and rotations ({len(cos)} positions)"
        )
    return hits


def compile_for(k_dim: int, chunk_size: int, kind: str, storage: str) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first token needs it."""
    _kernel(STORAGE_TYPES[kind].kernel_dtype.name, STORAGE_TYPES[storage].kernel_dtype.name)
    _region(isa(), kind, storage, k_dim, chunk_size)


@lru_cache(maxsize=4096)
def _plan(
    chosen: tuple[int, ...], ids: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...],
    coefficients: tuple[int, ...], basis: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...],
    rows: tuple[int, ...], stored: tuple[int, ...], dtype: np.dtype, stored_dtype: np.dtype,
    pairs: int, offset: int, instructions: str,
) -> tuple[Any, int, np.dtype, np.dtype]:  # fmt: skip
    storage, kind = storage_of(stored_dtype), storage_of(dtype)
    k_dim, v_dim = keys[-1], values[-1]
    fitting = (
        len(chosen) == 3 and len(keys) == 5 and len(coefficients) == 3 and kind.group == 1
        and chosen == ids and keys[:2] == chosen[:2] and keys[2] > chosen[2] and values[:4] == keys[:4]
        and basis == (*chosen[:2], coefficients[2], k_dim) and coefficients[:1] == rows == chosen[:1]
        and cos == sin and cos[1:] == (pairs,) and offset >= 0 and offset + 2 * pairs <= k_dim
        and stored[1:3] == (chosen[1], keys[3]) and stored[3] * storage.group == v_dim
    )  # fmt: skip
    if not fitting:
        raise ValueError(
            f"chosen {chosen}, ids {ids}, keys {keys}, values {values}, coefficients {coefficients}, basis {basis}, "
            f"cos {cos}, sin {sin} ({pairs} pairs from channel {offset}), a table of {rows} rows and stored values "
            f"{stored} do not fit together"
        )
    kernel = _kernel(kind.kernel_dtype.name, storage.kernel_dtype.name)
    region = address_of(_region(instructions, kind.name, storage.name, k_dim, keys[3]))
    return kernel, region, kind.kernel_dtype, storage.kernel_dtype


@device_function
def _divided(chosen, ids, chunks, free):
    """Returns the number of hits, and each miss's list and chunk; writes the slot for each miss to `free`.

    A negative number of hits reports an id out of range or a chunk that is in two slots.
    """
    lists, count = chosen.shape
    is_slot = np.zeros(chunks, np.uint8)
    of_list, missing = np.empty(lists * count, np.int64), np.empty(lists * count, np.int64)
    misses = 0
    for index in range(lists):
        is_slot[:] = 0
        for slot in range(count):
            if ids[index, slot] >= chunks:
                return -1, of_list, missing
            if ids[index, slot] >= 0:
                is_slot[ids[index, slot]] = 1
        first = misses
        for each in range(count):
            chunk = chosen[index, each]
            if chunk < 0 or chunk >= chunks:
                return -1, of_list, missing
            if is_slot[chunk]:
                is_slot[chunk] = 2
            else:
                of_list[misses], missing[misses] = index, chunk
                misses += 1
        place = first
        for slot in range(count):
            if place < misses and (ids[index, slot] < 0 or is_slot[ids[index, slot]] != 2):
                free[place] = slot
                place += 1
        if place < misses:
            return -1, of_list, missing
    return lists * count - misses, of_list, missing


@device_function
def _put(rows, target, is_float32, is_float16):
    """Write rows [n, dim] float32 to `target` in its storage type."""
    for t in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            if is_float32:
                target[t, d] = rows[t, d]
            elif is_float16:
                target[t, d] = as_float16(rows[t, d])
            else:
                target[t, d] = as_bfloat16(rows[t, d])


_INT1, _INT3, _TABLE = (
    types.Array(types.int64, 1, "C"), types.Array(types.int64, 3, "C"), types.Array(types.int32, 2, "C"),
)  # fmt: skip


def _arrays(numbers: str, stored_numbers: str) -> tuple[Any, ...]:
    """The types of (keys, values, coefficients, basis, cos, sin, table, stored)."""
    number = from_dtype(np.dtype(numbers))
    five, four, three, two = (types.Array(number, dims, "C") for dims in (5, 4, 3, 2))
    return five, five, three, four, two, two, _TABLE, types.Array(from_dtype(np.dtype(stored_numbers)), 4, "C")


@region_arguments("rebuild chunks")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(of_list, missing, free, misses, first_slot, keys, values, coefficients, basis, cos, sin, table, stored, offset,
    step, second); the variant is "dtype,stored dtype", and the first three come from `_divided`."""
    integer = types.int64
    return (_INT1, _INT1, _INT1, integer, integer, *_arrays(*variant.split(",")), integer, integer, integer)


@cache
def _kernel(numbers: str, stored_numbers: str) -> Any:
    variant, code_version = f"{numbers},{stored_numbers}", CODE_VERSION

    integers, addresses = (types.int64,) * 5, (types.int64,) * 2
    signature = types.int64(*addresses, _INT3, _INT3, *_arrays(numbers, stored_numbers), *integers)

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def hold(
        run, region, chosen, ids, keys, values, coefficients, basis, cos, sin, table, stored, chunks, offset, step,
        second, threads,
    ):  # fmt: skip
        rows, kv_heads, count = chosen.shape
        chunk_size = values.shape[3]
        lists = rows * kv_heads
        if chunks * chunk_size > min(coefficients.shape[1], cos.shape[0]) or chunks > table.shape[1]:
            return np.int64(-1)
        free = np.empty(lists * count, np.int64)
        flat_ids = ids.reshape(lists, count)
        hits, of_list, missing = _divided(chosen.reshape(lists, count), flat_ids, chunks, free)
        if hits < 0:
            return np.int64(-1)
        misses = lists * count - hits
        for miss in range(misses):
            block = table[of_list[miss] // kv_heads, missing[miss]]
            if block < 0 or block >= stored.shape[0]:
                return np.int64(-1)
        region_args = (
            of_list, missing, free, misses, keys.shape[2] - 1 - count, keys, values, coefficients, basis, cos, sin,
            table, stored, offset, step, second,
        )  # fmt: skip
        run_region("rebuild chunks", variant, run, region, threads, region_args)
        for miss in range(misses):
            flat_ids[of_list[miss], free[miss]] = missing[miss]
        return np.int64(hits + 0 * code_version)

    return hold


@cache
def _region(instructions: str, kind: str, storage: str, k_dim: int, chunk_size: int) -> Any:
    tiles = tiles_for(instructions, chunk_size, 1)
    lanes, tile_tokens, columns = tiles.lanes, tiles.queries, tiles.columns
    is_float32, is_float16 = kind == "float32", kind == "float16"
    variant = f"{STORAGE_TYPES[kind].kernel_dtype.name},{STORAGE_TYPES[storage].kernel_dtype.name}"
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def rebuild(thread, threads, arguments):
        (
            of_list, missing, free, misses, first_slot, keys, values, coefficients, basis, cos, sin, table, stored,
            offset, step, second,
        ) = arguments_at("rebuild chunks", variant, arguments)  # fmt: skip
        kv_heads, v_dim = keys.shape[1], values.shape[4]
        rank, pairs = coefficients.shape[2], cos.shape[1]
        factors, rebuilt, fetched = scratch(chunk_size, rank), scratch(chunk_size, k_dim), scratch(chunk_size, v_dim)
        cosines, sines = scratch(chunk_size, pairs), scratch(chunk_size, pairs)
        for miss in range(misses * thread // threads, misses * (thread + 1) // threads):
            row, head = of_list[miss] // kv_heads, of_list[miss] % kv_heads
            start, slot = missing[miss] * chunk_size, first_slot + free[miss]
            at = (row * coefficients.shape[1] + start) * rank
            decode_numbers(lanes, kind, coefficients, at, chunk_size * rank, factors)
            decode_numbers(lanes, kind, cos, start * pairs, chunk_size * pairs, cosines)
            decode_numbers(lanes, kind, sin, start * pairs, chunk_size * pairs, sines)
            at = (np.int64(table[row, missing[miss]]) * kv_heads + head) * (chunk_size * stored.shape[3])
            decode_numbers(lanes, storage, stored, at, chunk_size * v_dim, fetched)
            rebuilt[:] = 0
            accumulate_rows(
                lanes, kind, k_dim, chunk_size, tile_tokens, 1, columns, factors, 0, tile_tokens * rank, rank,
                basis, of_list[miss] * (rank * k_dim), rank, rebuilt, basis, 0, 0, 0,
            )  # fmt: skip
            for t in range(chunk_size):
                for pair in range(pairs):
                    d = offset + pair * step
                    a, b = rebuilt[t, d], rebuilt[t, d + second]
                    rebuilt[t, d] = a * cosines[t, pair] - b * sines[t, pair]
                    rebuilt[t, d + second] = b * cosines[t, pair] + a * sines[t, pair]
            _put(rebuilt, keys[row, head, slot], is_float32, is_float16)
            _put(fetched, values[row, head, slot], is_float32, is_float16)
        return np.int64(0 * code_version)

    return rebuild
