"""The memory that this process may still allocate: DRAM within every limit that applies to it, and the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from hetero_kv.control_groups import THIS_PROCESS, Group, control_groups

# cgroup v1 expresses "no limit" by a value of at least this size.
_UNLIMITED = 1 << 60


class Limit(NamedTuple):
    """A named limit that leaves this process `free` bytes."""

    name: str
    free: int


def dram_limits() -> list[Limit]:
    """Every limit on this process's DRAM, tightest first: the machine's, the control groups', the address space's."""
    limits = [Limit("memory available", psutil.virtual_memory().available), *_group_limits()]
    return sorted((*limits, *_address_space()), key=lambda limit: limit.free)


def free_dram() -> int:
    """DRAM that this process may still allocate, bytes."""
    return dram_limits()[0].free


def limits_addresses() -> bool:
    """Whether this process's address space is limited; file mappings then count as memory."""
    return any(_address_space())


def free_gpu(device: str = "cuda") -> int:
    """Memory of a CUDA device that this process may still allocate, bytes: free, or reserved by torch but unused."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _address_space() -> Iterator[Limit]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield Limit("address space (ulimit -v)", max(0, soft - psutil.Process().memory_info().vms))


class _Names(NamedTuple):
    """File names of a cgroup version: limits, usage, and the statistic of reclaimable bytes."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str


_NAMES = {
    1: _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def _group_limits(process: Path = THIS_PROCESS) -> Iterator[Limit]:
    """The limits of a process's control groups and their ancestors; `process` is its folder in /proc."""
    for group in control_groups("memory", process):
        names = _NAMES[group.version]
        used = group.number(names.used)
        if used is None:
            continue
        # The kernel reclaims inactive file pages before it refuses an allocation.
        used -= _statistic(group, names.reclaimable)
        for name in names.limits:
            limit = group.number(name)
            if limit is not None and limit < _UNLIMITED:
                yield Limit(f"control group {group.folder}", max(0, limit - used))


def _statistic(group: Group, name: str) -> int:
    try:
        rows = dict(line.split() for line in (group.text("memory.stat") or "").splitlines())
    except ValueError:
        return 0
    return int(rows.get(name, 0))
