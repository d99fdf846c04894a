"""How much memory this process may still take: DRAM within every limit it runs under, and the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

# A limit of this size means none: cgroup v1 has no other way to say it.
_UNLIMITED = 1 << 60


class Limit(NamedTuple):
    """Something that bounds what this process may still take, `free` bytes."""

    name: str
    free: int


def dram_limits() -> list[Limit]:
    """Every bound on this process's DRAM, the tightest first: the machine, its control groups, its address space."""
    limits = [Limit("memory available", psutil.virtual_memory().available), *_cgroups(Path("/proc/self"))]
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


class _Version(NamedTuple):
    """The names of one cgroup version: its limits, what is used, and the statistic of what could be given back."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _cgroups(process: Path) -> Iterator[Limit]:
    """The bounds of the control groups of a process and of those around them; `process` is its folder in /proc."""
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            version, filesystem, option = _V2, "cgroup2", None
        elif "memory" in controllers.split(","):
            version, filesystem, option = _V1, "cgroup", "memory"
        else:
            continue
        for root, mount_point in _mounted(mounts, filesystem, option):
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            folder = mount_point / inside
            for group in (folder, *folder.parents):
                # A group is also held to the limits of the groups around it.
                yield from _headroom(group, version)
                if group == mount_point:
                    break


def _mounted(mounts: list[str], filesystem: str, option: str | None) -> Iterator[tuple[Path, Path]]:
    """(root within the file system, mount point) of mounts, from the lines of /proc/self/mountinfo."""
    for line in mounts:
        place, _, kind = line.partition(" - ")
        fields, (name, _, options) = place.split(), kind.split(maxsplit=2)
        if name == filesystem and (option is None or option in options.split(",")):
            yield Path(fields[3]), Path(fields[4].replace("\\040", " "))


def _headroom(group: Path, version: _Version) -> Iterator[Limit]:
    try:
        used = int((group / version.used).read_text())
    except (OSError, ValueError):  # the root group counts nothing, a container may not see the groups around it
        return
    # File pages nobody has used lately are given back before anything is refused.
    used -= _statistic(group / "memory.stat", version.reclaimable)
    for name in version.limits:
        try:
            limit = (group / name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < _UNLIMITED:
            yield Limit(f"control group {group}", max(0, int(limit) - used))


def _statistic(file: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))
