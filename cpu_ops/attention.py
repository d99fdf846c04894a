"""Attention of one query position to blocks of keys and values, read in place in DRAM.

`list_attention` has the kernels.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import get_num_threads, set_num_threads

from hetero_kv.cpu_ops import list_attention
from hetero_kv.cpu_ops.array_checks import check_lists, check_offsets, outside_pool, wrong_array
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time, use_threads

NO_OFFSETS = np.empty((0, 0, 0), np.uint16)


def attend_blocks(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_ids: np.ndarray,
    block_counts: np.ndarray,
    block_lengths: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    out: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    threads: int | None = None,
    key_offsets: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of one query position per sequence to the blocks in its lists.

    q: [rows, kv_heads, group, k_dim] float32, grouped by kv head.
    keys: [num_blocks, kv_heads, block_size, k_dim], values: [num_blocks, kv_heads, block_size, v_dim], each of a
    storage type (`cpu_ops.storage`; the last dimension counts records for grouped types). Only listed blocks are read.
    block_ids: [rows, 1 or kv_heads, max_blocks] int32, one list for all kv heads or one for each.
    block_counts: [rows, 1 or kv_heads] int32, entries in use. block_lengths: [num_blocks] int32, tokens in each block.
    scale multiplies the scores; softcap c > 0 then turns them into c * tanh(score / c).
    threads: number of threads (None: Numba's setting). key_offsets: [num_blocks, kv_heads, k_dim] uint16, bits of the
    float16 vector that was subtracted from the keys of each block before storing; None if nothing was subtracted.

    Returns out [rows, kv_heads, group, v_dim] float32 and lse [rows, kv_heads, group] float32, the natural logarithm of
    the sum of exp(score); 0 and -inf for an empty list. `out` and `lse` are written in place if passed.

    Raises ValueError or TypeError for arrays that do not fit together, IndexError for ids, counts or lengths that
    point outside the pool.
    """
    kernel, region, k_dtype, v_dtype, rows, kv_heads, group, v_dim = _plan(
        q.shape, keys.shape, values.shape, block_ids.shape, block_counts.shape, block_lengths.shape,
        keys.dtype, values.dtype, softcap > 0, isa(), None if key_offsets is None else key_offsets.shape,
    )  # fmt: skip
    if out is None:
        out = np.empty((rows, kv_heads, group, v_dim), np.float32)
    if lse is None:
        lse = np.empty((rows, kv_heads, group), np.float32)
    if out.shape != (rows, kv_heads, group, v_dim) or lse.shape != (rows, kv_heads, group):
        raise ValueError(f"out {out.shape} and lse {lse.shape} should be {(rows, kv_heads, group)} + ({v_dim},) and ()")
    lists = NO_OFFSETS if key_offsets is None else key_offsets, block_ids, block_counts, block_lengths
    # The same as `kernel_threads`, inlined: this runs for every layer of every token.
    with one_kernel_at_a_time:
        before = get_num_threads()
        used = before if threads is None or threads == before else use_threads(threads)
        try:
            status = kernel(
                all_threads(), region, 0, q[:, None], keys.view(k_dtype), values.view(v_dtype), *lists,
                scale, softcap, used, out, lse,
            )  # fmt: skip
        except TypeError as error:
            raise TypeError(wrong_array(q, keys, values, block_ids, block_counts, block_lengths, out, lse)) from error
        finally:
            if used != before:
                set_num_threads(before)
    if status < 0:
        raise IndexError(outside_pool(status, keys, block_ids, block_counts, block_lengths))
    return out, lse


def compile_for(
    group: int, k_dim: int, v_dim: int, block_size: int, storage: str = "float16", softcap: bool = False,
    value_storage: str | None = None, offset: bool = False,
) -> None:  # fmt: skip
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first token needs it.

    storage: of keys, and of values if `value_storage` is None. offset: whether `key_offsets` are used. Raises
    ValueError for a type that is not registered.
    """
    value_storage = value_storage or storage
    for each in (storage, value_storage):
        if each not in STORAGE_TYPES:
            raise ValueError(f"storage {each!r} is not one of {', '.join(STORAGE_TYPES)}")
    list_attention.kernel_for(numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[value_storage]))
    list_attention.region(isa(), storage, value_storage, group, k_dim, v_dim, block_size, softcap, offset)


class _Plan(NamedTuple):
    kernel: Any
    region: int
    k_dtype: np.dtype
    v_dtype: np.dtype
    rows: int
    kv_heads: int
    group: int
    v_dim: int


@lru_cache(maxsize=4096)
def _plan(
    q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    lengths: tuple[int, ...], dtype: np.dtype, value_dtype: np.dtype, softcapped: bool, instructions: str,
    offsets: tuple[int, ...] | None,
) -> "_Plan":  # fmt: skip
    """Check that shapes fit together and find their kernel; cached, because every layer of every token needs it."""
    k_storage, v_storage, v_dim = check_lists(q, keys, values, ids, counts, lengths, dtype, value_dtype)
    rows, kv_heads, group, k_dim = q
    check_offsets(offsets, keys, k_dim)
    shape = group, k_dim, v_dim, keys[2]
    names = k_storage.name, v_storage.name
    region = address_of(list_attention.region(instructions, *names, *shape, softcapped, offsets is not None))
    kernel = list_attention.kernel_for(numbers_of(k_storage, v_storage))
    return _Plan(kernel, region, k_storage.kernel_dtype, v_storage.kernel_dtype, rows, kv_heads, group, v_dim)


def region_for(
    q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    lengths: tuple[int, ...], dtype: np.dtype, value_dtype: np.dtype, softcapped: bool,
    offsets: tuple[int, ...] | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Returns the address of the region "attend lists" for arrays of these shapes (as in `attend_blocks`), and v_dim.

    Raises the errors of `check_lists`.
    """
    plan = _plan(q, keys, values, ids, counts, lengths, dtype, value_dtype, softcapped, isa(), offsets)
    return plan.region, plan.v_dim
