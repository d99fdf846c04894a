"""The DRAM read bandwidth of this machine: the fastest of several plain reading kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hetero_kv.cpu_ops  # noqa: F401  before torch, for it sets how OpenMP waits

# isort: split
import numpy as np
import torch
from numba import njit, prange

from benchmarks.timing import seconds

STRETCH = 1 << 25
"""Bytes per read: long compared with a call's overhead, short enough to avoid disturbances."""
WAYS = 4
"""The number of stretches that `fastest_read` needs."""


@njit(parallel=True, fastmath=True)
def _sum_in_order(words):
    total = np.uint64(0)
    for i in prange(words.size):
        total += words[i]
    return total


@njit(parallel=True, fastmath=True)
def _sum_floats(floats):
    total = np.float32(0)
    for i in prange(floats.size):
        total += floats[i]
    return total


@njit(parallel=True, fastmath=True)
def _sum_four_streams(words):
    quarter = words.size // 4
    total = np.uint64(0)
    for i in prange(quarter):
        total += words[i] + words[quarter + i] + words[2 * quarter + i] + words[3 * quarter + i]
    return total


def stretches_of(memory: np.ndarray) -> list[np.ndarray]:
    """Contiguous memory [bytes] uint8 divided into stretches of words; the remainder is dropped."""
    words = memory[: memory.size // STRETCH * STRETCH].view(np.uint64)
    return np.split(words, words.nbytes // STRETCH)


def fastest_read(stretches: Sequence[np.ndarray]) -> float:
    """Seconds per byte of the fastest kernel; each of the `WAYS` kernels reads a stretch that is in no cache."""
    first, second, third, fourth = stretches
    tensor = torch.from_numpy(fourth.view(np.int64))
    ways: tuple[Callable[[], object], ...] = (
        lambda: _sum_in_order(first),
        lambda: _sum_floats(second.view(np.float32)),
        lambda: _sum_four_streams(third),
        tensor.sum,
    )
    return min(seconds(way) for way in ways) / STRETCH
