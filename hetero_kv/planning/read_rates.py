"""Measures how fast a GPU's kernel reads scattered rows of DRAM, and how fast the CPU reads DRAM."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.store.memory import reserve

# Bytes of DRAM, more than caches hold, and bytes per call: long compared with a launch.
_MEMORY, _CALL = 512 << 20, 32 << 20
_CALLS = 5


class ReadRates(NamedTuple):
    """Bytes/s of reading DRAM.

    Attributes:
        cpu: by torch's threads, in order: the most that attention to blocks can reach.
        bus: by a GPU's kernel, over the bus, of scattered rows.
    """

    cpu: float
    bus: float


@functools.cache
def read_rates(device: torch.device, row: int, threads: int) -> ReadRates | None:
    """The rates of this machine, measured on the first call in a process with these arguments; takes about a second.

    Args:
        device: the GPU. Triton must run there.
        row: bytes of a row, such as the keys of a block and kv head.
        threads: torch's present number of threads, on which the CPU's rate depends.

    Returns None where CUDA does not page-lock DRAM. Raises MemoryError or torch.OutOfMemoryError for lack of memory.
    """
    return measured(device, row, _MEMORY, _CALL)


def measured(device: torch.device, row: int, memory: int, call: int) -> ReadRates | None:
    """As `read_rates`, with `memory` bytes of DRAM, of which each measured call reads other `call` bytes."""
    # Zeros that were never written would be one page of DRAM.
    words = torch.from_numpy(reserve(memory // 8 * 8)).view(torch.int64).fill_(1)
    parts = words.split(call // 8)
    cpu = _median_seconds([part.sum for part in parts[:_CALLS]])
    mapped = MappedMemory(words, device)
    with warnings.catch_warnings():
        # It says what a cache does then, and there is none.
        warnings.filterwarnings("ignore", "CUDA could not page-lock", RuntimeWarning)
        if not mapped.reach(words.nbytes):
            return None
    bus = _median_seconds(_gathers(words, device, row, call))
    return ReadRates(parts[0].nbytes / cpu, call // row * row / bus)


def _gathers(words: torch.Tensor, device: torch.device, row: int, call: int) -> list[Callable[[], None]]:
    """Calls that read rows of page-locked memory, each other ones, and wait for them."""
    from hetero_kv.gpu_ops.triton_kernels import gather

    # The kernel reads numbers of 4 bytes.
    numbers = words.view(torch.int32)
    width, count = row // 4, call // row
    rows = numbers[: len(numbers) // width * width].view(-1, width)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    lists = [each.to(device) for each in order.split(count)[: _CALLS + 1]]
    out = torch.empty(count, width, dtype=torch.int32, device=device)

    def reading(where: torch.Tensor) -> None:
        with torch.cuda.device(device):
            gather.gathered_rows(rows, where, out)
        torch.cuda.synchronize(device)

    # The first call compiles the kernel.
    reading(lists[0])
    return [functools.partial(reading, where) for where in lists[1:]]


def _median_seconds(actions: Sequence[Callable[[], object]]) -> float:
    seconds = []
    for action in actions:
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
