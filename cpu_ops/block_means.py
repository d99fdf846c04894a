"""Means of blocks of consecutive tokens: those before a chunk and those of the chunk."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import number
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.gathered_rows import copy_row
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.listed_keys import address_in, places_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.threads import kernel_threads


def block_means(past: np.ndarray, new: np.ndarray, block: int, threads: int | None = None) -> np.ndarray:
    """Means of blocks of `block` tokens, counted from the first past token; the last block may be shorter.

    past: [batch, heads, past, dim] and new: [batch, heads, n, dim], both float32, or both bits of bfloat16 (uint16).
    threads: number of threads (None: Numba's setting).

    Returns [batch, heads, blocks, dim] float32, summed in float32 token by token. Raises ValueError or TypeError for
    arrays that do not fit together.
    """
    if past.shape[:2] != new.shape[:2] or past.shape[3:] != new.shape[3:] or block < 1:
        raise ValueError(f"past {past.shape}, new {new.shape} and blocks of {block} do not fit")
    means = np.empty((*new.shape[:2], -(-(past.shape[2] + new.shape[2]) // block), new.shape[3]), np.float32)
    variant = "float32" if new.dtype == np.float32 else "bfloat16"
    numbers = [each if each.strides[3] == each.itemsize else np.ascontiguousarray(each) for each in (past, new)]
    with kernel_threads(threads) as used:
        call_region("block means", variant, _region(variant, new.shape[3]), (*numbers, block, means), used)
    return means


def compile_for(in_bfloat16: bool, dim: int) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first prompt needs it."""
    _region("bfloat16" if in_bfloat16 else "float32", dim)


@region_arguments("block means")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(past, new, block, means), as in `block_means`; the last dimension is contiguous."""
    numbers = types.Array(types.uint16 if variant == "bfloat16" else types.float32, 4, "A")
    return numbers, numbers, types.int64, types.Array(types.float32, 4, "C")


@cache
def _region(variant: str, dim: int) -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def mean(thread, threads, arguments):
        past, new, block, means = arguments_at("block means", variant, arguments)
        before, n, (batch, heads, blocks) = past.shape[2], new.shape[2], means.shape[:3]
        token = np.empty(dim, past.dtype)
        for item in range(thread, batch * heads * blocks, threads):
            row, head, place = item // blocks // heads, item // blocks % heads, item % blocks
            first, stop = place * block, min((place + 1) * block, before + n)
            own = means[row, head, place]
            own[:] = 0
            places = places_of(past, new, row, head)
            for t in range(first, stop):
                copy_row(dim, address_in(places, before, t), token, 0)
                for d in range(dim):
                    own[d] += number(token[d])
            share = np.float32(1) / np.float32(stop - first)
            for d in range(dim):
                own[d] *= share
        return np.int64(0 * code_version)

    return address_of(mean)
