"""How much memory this process may still take: DRAM within every limit it runs under, and the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from hetero_kv.control_groups import THIS_PROCESS, Group, control_groups

# A limit of this size means none: cgroup v1 has no other way to say it.
_UNLIMITED = 1 << 60


class Limit(NamedTuple):
    """Something that bounds what this process may still take, `free` bytes."""

    name: str
    free: int


def dram_limits() -> list[Limit]:
    """Every bound on this process's DRAM, the tightest first: the machine, its control groups, its address space."""
    limits = [Limit("memory available", psutil.virtual_memory().available), *_group_limits()]
    return sorted((*limits, *_address_space()), key=lambda limit: limit.free)


def free_dram() -> int:
    """DRAM that this process may still take, bytes."""
    return dram_limits()[0].free


def limits_addresses() -> bool:
    """Whether this process's address space is bounded, in which what is mapped from files counts too."""
    return any(_address_space())


def free_gpu(device: str = "cuda") -> int:
    """Memory of a CUDA device that this process may still take, bytes: what is free, and what torch holds unused."""
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
    """The files of a version's groups: limits, what is used, and the statistic of what could be given back."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str


_NAMES = {
    1: _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def _group_limits(process: Path = THIS_PROCESS) -> Iterator[Limit]:
    """The bounds of the control groups of a process and of those around them; `process` is its folder in /proc."""
    for group in control_groups("memory", process):
        names = _NAMES[group.version]
        used = group.number(names.used)
        if used is None:
            continue
        # File pages nobody has used lately are given back before anything is refused.
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
