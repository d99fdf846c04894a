"""The number of CPUs that this process may use: its affinity, bounded by the CPU quota of its control groups.

Threads beyond a container's quota gain nothing. The kernel stops all threads for the rest of each period, and the
running ones wait for those that were stopped in the middle of a matrix product.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetero_kv.control_groups import THIS_PROCESS, Group, control_groups

#: Environment variables by which users choose the number of threads of torch and of the kernels.
OMP_THREADS, NUMBA_THREADS = "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"
# The period if cpu.max names none, in microseconds.
_USUAL_PERIOD = 100_000


def cpu_quota(process: Path = THIS_PROCESS) -> float | None:
    """CPUs that the tightest control group allows a process, as a fraction; None without a quota.

    process: the process's folder in /proc.
    """
    return min((quota for group in control_groups("cpu", process) if (quota := _quota(group))), default=None)


def usable_cpus(process: Path = THIS_PROCESS) -> int:
    """Threads of this process that can run at once: whole CPUs of its affinity and quota, at least 1."""
    quota = cpu_quota(process)
    return affine_cpus() if quota is None else max(1, min(affine_cpus(), int(quota)))


def affine_cpus() -> int:
    """CPUs that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_threads_within_quota() -> None:
    """Limit the threads of torch and Numba to the CPU quota, unless the user sets their number.

    Both know only the affinity. Before they are loaded, the environment variables limit them. Afterwards torch is set
    directly, and the kernels use torch's number.
    """
    usable = usable_cpus()
    if usable >= affine_cpus():
        return
    if "numba" not in sys.modules:
        os.environ.setdefault(NUMBA_THREADS, str(usable))
    if OMP_THREADS in os.environ:
        return
    os.environ[OMP_THREADS] = str(usable)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > usable:
        torch.set_num_threads(usable)


def threads_by_environment() -> int | None:
    """Threads by OMP_NUM_THREADS, the first of a list; None if it contains no positive number."""
    first = os.environ.get(OMP_THREADS, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _quota(group: Group) -> float | None:
    if group.version == 1:
        quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
    else:
        quota, _, period = (group.text("cpu.max") or "").partition(" ")
    # Version 1 writes -1 without a quota, version 2 writes max.
    if not quota or not quota.isdecimal() or int(quota) == 0:
        return None
    return int(quota) / (int(period) if period and period.isdecimal() and int(period) else _USUAL_PERIOD)
