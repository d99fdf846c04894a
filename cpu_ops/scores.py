"""Scores of the blocks of a Context by their representatives, which predict how much a query attends to each."""

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import from_dtype, get_num_threads, njit, set_num_threads, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.kernel_address import address_of, called_as
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.simd import score_tile
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time, use_threads
from hetero_kv.cpu_ops.tiles import tiles_for

MODES = ("dot", "quest")


def block_scores(
    q: np.ndarray,
    representatives: np.ndarray,
    block_ids: np.ndarray,
    block_counts: np.ndarray,
    mode: str,
    out: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Score every listed block for every query head.

    q: [rows, kv_heads, group, k_dim] float32. representatives: [num_blocks, kv_heads, representative_num, k_dim] of a
    storage type. block_ids: [rows, max_blocks] int32. block_counts: [rows] int32, entries in use. mode "dot": the
    largest inner product with a representative. mode "quest": the upper bound sum_d max(q_d max_d, q_d min_d) of the
    scores in a block whose representatives are its elementwise maximum and minimum (Quest, arXiv:2406.10774,
    algorithm 1).

    Returns [rows, kv_heads, group, max_blocks] float32 (written to `out` if passed), -inf after each row's count.
    Raises ValueError or TypeError for arrays that do not fit together, IndexError for ids or counts outside the pool.
    """
    kernel, region, kernel_dtype, shape = _plan(
        q.shape, representatives.shape, block_ids.shape, block_counts.shape, representatives.dtype, mode, isa()
    )
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape:
        raise ValueError(f"out {out.shape} must be {shape}")
    # The same as `kernel_threads`, inlined: this runs for every layer of every token.
    with one_kernel_at_a_time:
        before = get_num_threads()
        used = before if threads is None or threads == before else use_threads(threads)
        try:
            pool = representatives.view(kernel_dtype)
            status = kernel(all_threads(), region, q, pool, block_ids, block_counts, used, out)
        except TypeError as error:
            raise TypeError(
                f"q {q.dtype}, representatives {representatives.dtype}, block_ids {block_ids.dtype}, block_counts "
                f"{block_counts.dtype}, out {out.dtype}: expected writeable C-contiguous arrays, q and out float32, "
                "ids and counts int32"
            ) from error
        finally:
            if used != before:
                set_num_threads(before)
    if status < 0:
        raise IndexError(
            f"block_ids must lie in 0..{representatives.shape[0] - 1} and block_counts in 0..{block_ids.shape[1]}"
        )
    return out


@lru_cache(maxsize=4096)
def _plan(
    q: tuple[int, ...], representatives: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    dtype: np.dtype, mode: str, instructions: str,
) -> tuple[Any, int, np.dtype, tuple[int, ...]]:  # fmt: skip
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    storage = storage_of(dtype)
    if (
        len(q) != 4
        or len(representatives) != 4
        or (representatives[1], representatives[3] * storage.group)
        != (
            q[1],
            q[3],
        )
    ):
        raise ValueError(
            f"representatives {representatives} do not fit q {q}: kv_heads (second) and k_dim (last) must be equal"
        )
    if min(q[2], q[3], representatives[2]) < 1:
        raise ValueError(f"q {q}, representatives {representatives}: group, k_dim and their number must be at least 1")
    if mode == "quest" and representatives[2] != 2:
        raise ValueError(f"mode 'quest' needs 2 representatives, maximum and minimum; there are {representatives[2]}")
    if len(ids) != 2 or ids[0] != q[0] or counts != ids[:1]:
        raise ValueError(f"block_ids {ids} must be [{q[0]}, max_blocks] and block_counts {counts} [{q[0]}]")
    region = address_of(_region(instructions, storage.name, mode, q[2], representatives[2], q[3]))
    return kernel_for(storage.kernel_dtype.name), region, storage.kernel_dtype, (*q[:3], ids[1])


def region_for(
    q: tuple[int, ...], representatives: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    dtype: np.dtype, mode: str,
) -> int:  # fmt: skip
    """Returns the address of the region "score" for arrays of these shapes (as in `block_scores`).

    Raises ValueError or TypeError for arrays that do not fit together.
    """
    return _plan(q, representatives, ids, counts, dtype, mode, isa())[1]


_REAL4, _INT2, _INT1 = (
    types.Array(types.float32, 4, "C"),
    types.Array(types.int32, 2, "C"),
    types.Array(types.int32, 1, "C"),
)


def _pool(numbers: str) -> Any:
    return types.Array(from_dtype(np.dtype(numbers)), 4, "C")


@region_arguments("score")
def arguments(numbers: str) -> tuple[Any, ...]:
    """The regions' arguments: (q, representatives, block_ids, block_counts, out).

    numbers: the dtype as which kernels view representatives.
    """
    return _REAL4, _pool(numbers), _INT2, _INT1, _REAL4


@called_as("score")
def signature(numbers: str) -> Any:
    """The kernels' signature: (run, region, q, representatives, block_ids, block_counts, threads, out).

    run: `parallel_region.all_threads()`. region: its address. Returns a status; a negative one reports an error.
    """
    integer = types.int64
    return integer(integer, integer, _REAL4, _pool(numbers), _INT2, _INT1, integer, _REAL4)


@cache
def kernel_for(numbers: str) -> Any:
    """Compile the kernel for representatives viewed as `numbers`, or load it from Numba's on-disk cache."""
    code_version = CODE_VERSION

    @njit(signature(numbers), cache=True, nogil=True, error_model="numpy")
    def score_lists(run, region, q, representatives, block_ids, block_counts, threads, out):
        rows, max_blocks = block_ids.shape
        for row in range(rows):
            if block_counts[row] < 0 or block_counts[row] > max_blocks:
                return np.int64(-1)
            for entry in range(block_counts[row]):
                if block_ids[row, entry] < 0 or block_ids[row, entry] >= representatives.shape[0]:
                    return np.int64(-1)
        run_region("score", numbers, run, region, threads, (q, representatives, block_ids, block_counts, out))
        return np.int64(0 * code_version)

    return score_lists


@cache
def _region(instructions: str, storage: str, mode: str, group: int, representative_num: int, k_dim: int) -> Any:
    lanes, _, tile_queries, *_ = tiles_for(instructions, group, 1)
    vectors = 1 if mode == "quest" else representative_num
    units = STORAGE_TYPES[storage].units(k_dim)
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        q, representatives, block_ids, block_counts, out = arguments_at("score", numbers, arguments)
        rows, max_blocks = block_ids.shape
        kv_heads = q.shape[1]
        total = rows * max_blocks
        tile = np.empty((group, vectors), np.float32)
        # A block's representatives are contiguous over kv heads, and are read in this order.
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            row, entry = item // max_blocks, item % max_blocks
            if entry >= block_counts[row]:
                out[row, :, :, entry] = -np.inf
                continue
            r_at = np.int64(block_ids[row, entry]) * kv_heads * (representative_num * units)
            q_at = row * kv_heads * (group * k_dim)
            for head in range(kv_heads):
                for vector in range(vectors):
                    score_tile(
                        lanes, mode, storage, k_dim, group, tile_queries, 1, q, q_at,
                        representatives, r_at + vector * units, tile, vector, vectors,
                    )  # fmt: skip
                for g in range(group):
                    best = tile[g, 0]
                    for vector in range(1, vectors):
                        best = max(best, tile[g, vector])
                    out[row, head, g, entry] = best
                r_at += representative_num * units
                q_at += group * k_dim
        return np.int64(0 * code_version)

    return score
