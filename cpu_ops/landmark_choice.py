"""Chooses chunks by their landmarks (ShadowKV, arXiv:2410.21465, algorithm 2)."""

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.row_maximum import row_max
from hetero_kv.cpu_ops.simd import score_tile
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, storage_of
from hetero_kv.cpu_ops.threads import on_threads
from hetero_kv.cpu_ops.tiles import tiles_for
from hetero_kv.cpu_ops.top_k import select

_AT_ONCE = 64
"""Landmarks in a thread's unit of work."""


def best_chunks(
    q: np.ndarray,
    landmarks: np.ndarray,
    outliers: np.ndarray,
    chunks: int,
    count: int,
    scale: float,
    softcap: float = 0.0,
    threads: int | None = None,
) -> np.ndarray:
    """Returns the chunks with the largest softmax share of their landmark, maximised over the kv head's queries.

    q: [rows, kv_heads, group, dim] float32. landmarks: [rows, kv_heads, capacity, dim] of an ungrouped storage type,
    one for each of the first `chunks` chunks. outliers: [rows, kv_heads, n] int64, chunks that are left out of the
    softmax and of the choice. count: chunks to choose, 1 to chunks - n. scale, softcap: as in
    `cpu_ops.attention.attend_blocks`. threads: number of threads (None: Numba's setting).

    Returns [rows, kv_heads, count] int64, ascending; ties go to the lower chunk. Shares are compared as logarithms, so
    that none underflows. Raises ValueError or TypeError for arrays that do not fit together, IndexError for an outlier
    that is not a chunk.
    """
    kernel, regions, kernel_dtype = _plan(q.shape, landmarks.shape, outliers.shape, landmarks.dtype, isa())
    if not (0 <= chunks <= landmarks.shape[2] and 1 <= count <= chunks - outliers.shape[2]):
        raise ValueError(
            f"{count} of {chunks} chunks besides {outliers.shape[2]} outliers, landmarks {landmarks.shape}"
        )
    out = np.empty((*q.shape[:2], count), np.int64)
    arrays = q, landmarks.view(kernel_dtype), outliers
    if not on_threads(threads, kernel, all_threads(), *regions, *arrays, chunks, scale, softcap, out):
        raise IndexError(f"outliers range over {outliers.min()}..{outliers.max()}; chunks are 0..{chunks - 1}")
    return out


def compile_for(group: int, dim: int, storage: str) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first token needs it."""
    _kernel(STORAGE_TYPES[storage].kernel_dtype.name)
    _scoring(isa(), storage, group, dim)
    _choosing()


@lru_cache(maxsize=4096)
def _plan(
    q: tuple[int, ...], landmarks: tuple[int, ...], outliers: tuple[int, ...], dtype: np.dtype, instructions: str
) -> tuple[Any, tuple[int, int], np.dtype]:
    storage = storage_of(dtype)
    fitting = len(q) == len(landmarks) == 4 and len(outliers) == 3 and storage.group == 1
    if not (fitting and q[:2] == landmarks[:2] == outliers[:2] and q[3] == landmarks[3] and min(q[2:]) > 0):
        raise ValueError(f"q {q}, landmarks {landmarks} ({storage.name}) and outliers {outliers} do not fit together")
    regions = address_of(_scoring(instructions, storage.name, q[2], q[3])), address_of(_choosing())
    return _kernel(storage.kernel_dtype.name), regions, storage.kernel_dtype


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _log2_total(scores, row, count, most):
    """Returns log2 of the sum of 2 ** score over scores[row, :count]; most: the largest of these."""
    total = np.float32(0)
    for t in range(count):
        total += exp2(scores[row, t] - most)
    return most + np.log2(total)


_REAL4, _REAL2, _INT3 = (
    types.Array(types.float32, 4, "C"), types.Array(types.float32, 2, "C"), types.Array(types.int64, 3, "C"),
)  # fmt: skip


@region_arguments("score landmarks")
def _scoring_arguments(numbers: str) -> tuple[Any, ...]:
    """(scaled_q, landmarks, scores)."""
    return _REAL4, types.Array(from_dtype(np.dtype(numbers)), 4, "C"), _REAL2


@region_arguments("choose chunks")
def _choosing_arguments(_: str) -> tuple[Any, ...]:
    """(scores, outliers, softcap, out); scores are overwritten."""
    return _REAL2, _INT3, types.float64, _INT3


@cache
def _kernel(numbers: str) -> Any:
    code_version = CODE_VERSION

    addresses, pool = (types.int64,) * 3, types.Array(from_dtype(np.dtype(numbers)), 4, "C")
    real = types.float64
    signature = types.int64(*addresses, _REAL4, pool, _INT3, types.int64, real, real, _INT3, types.int64)

    @njit(signature, cache=True, nogil=True, error_model="numpy")
    def choose(run, scoring, choosing, q, landmarks, outliers, chunks, scale, softcap, out, threads):
        rows, kv_heads, group = q.shape[:3]
        lists = rows * kv_heads
        for index in range(lists):
            for each in range(outliers.shape[2]):
                outlier = outliers[index // kv_heads, index % kv_heads, each]
                if outlier < 0 or outlier >= chunks:
                    return np.int64(0)
        factor = np.float32(scale / softcap if softcap > 0 else scale * LOG2_E)
        scores = np.empty((lists * group, chunks), np.float32)
        run_region("score landmarks", numbers, run, scoring, threads, (q * factor, landmarks, scores))
        run_region("choose chunks", "", run, choosing, threads, (scores, outliers, softcap, out))
        return np.int64(1 + 0 * code_version)

    return choose


@cache
def _scoring(instructions: str, storage: str, group: int, dim: int) -> Any:
    lanes, _, tile_queries, _, _, tile_chunks, _ = tiles_for(instructions, group, _AT_ONCE)
    numbers, code_version = STORAGE_TYPES[storage].kernel_dtype.name, CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        scaled_q, landmarks, scores = arguments_at("score landmarks", numbers, arguments)
        chunks = scores.shape[1]
        parts = (chunks + _AT_ONCE - 1) // _AT_ONCE
        total = scaled_q.shape[0] * scaled_q.shape[1] * parts
        for item in range(total * thread // threads, total * (thread + 1) // threads):
            index, first = item // parts, item % parts * _AT_ONCE
            stop = min(first + _AT_ONCE, chunks)
            whole = stop - (stop - first) % tile_chunks
            q_at, s_at = index * (group * dim), index * (group * chunks)
            l_at = index * (landmarks.shape[2] * dim)
            for c in range(first, whole, tile_chunks):
                score_tile(
                    lanes, "dot", storage, dim, group, tile_queries, tile_chunks, scaled_q, q_at,
                    landmarks, l_at + c * dim, scores, s_at + c, chunks,
                )  # fmt: skip
            for c in range(whole, stop):
                score_tile(
                    lanes, "dot", storage, dim, group, tile_queries, 1, scaled_q, q_at,
                    landmarks, l_at + c * dim, scores, s_at + c, chunks,
                )  # fmt: skip
        return np.int64(0 * code_version)

    return score


@cache
def _choosing() -> Any:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def choose(thread, threads, arguments):
        scores, outliers, softcap, out = arguments_at("choose chunks", "", arguments)
        kv_heads, count = out.shape[1:]
        chunks, left_out, lists = scores.shape[1], outliers.shape[2], out.shape[0] * kv_heads
        group = scores.shape[0] // max(lists, 1)
        best = np.empty((1, chunks), np.float32)
        indices = np.empty((1, count), np.int32)
        for index in range(lists * thread // threads, lists * (thread + 1) // threads):
            row, head = index // kv_heads, index % kv_heads
            best[:] = -np.inf
            for g in range(group):
                each = index * group + g
                if softcap > 0:
                    row_softcap(scores, each, chunks, np.float32(softcap) * LOG2_E)
                for place in range(left_out):
                    scores[each, outliers[row, head, place]] = -np.inf
                most = row_max(scores, each, chunks)
                log_total = _log2_total(scores, each, chunks, most) if most > -np.inf else np.float32(0)
                for c in range(chunks):
                    share = scores[each, c] - log_total
                    if share > best[0, c]:
                        best[0, c] = share
            # NaN sorts below every share, including those of -inf.
            for place in range(left_out):
                best[0, outliers[row, head, place]] = np.nan
            select(best, np.full(1, chunks, np.int32), np.full(1, count, np.int32), indices)
            for place in range(count):
                out[row, head, place] = indices[0, place]
        return np.int64(0 * code_version)

    return choose
