"""How many CPUs this process may use: those of its affinity, within the CPU quota of its control groups.

Threads beyond the quota of a container gain nothing: the kernel stops all of them for the rest of each period, and
those that still run wait for those that were stopped in the middle of a matrix product.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetero_kv.control_groups import THIS_PROCESS, Group, control_groups

#: Environment variables by which users choose the threads of torch and of the kernels.
OMP_THREADS, NUMBA_THREADS = "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"
# Of cpu.max, where it names none; microseconds.
_USUAL_PERIOD = 100_000


def cpu_quota(process: Path = THIS_PROCESS) -> float | None:
    """CPUs that the tightest control group gives a process, fractions among them; None without a quota.

    process: its folder in /proc.
    """
    return min((quota for group in control_groups("cpu", process) if (quota := _quota(group))), default=None)


def usable_cpus(process: Path = THIS_PROCESS) -> int:
    """Threads of this process that can run at once: whole CPUs of its affinity and its quota, at least 1."""
    quota = cpu_quota(process)
    return affine_cpus() if quota is None else max(1, min(affine_cpus(), int(quota)))


def affine_cpus() -> int:
    """CPUs that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_threads_within_quota() -> None:
    """Have torch and Numba start with no more threads than the quota has CPUs, unless the user says how many.

    They know of the affinity alone. Before they are loaded the environment tells them, afterwards torch is told itself;
    kernels take its number.
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
    """Threads by OMP_NUM_THREADS, the first of a list; None where it names no number."""
    first = os.environ.get(OMP_THREADS, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _quota(group: Group) -> float | None:
    if group.version == 1:
        quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
    else:
        quota, _, period = (group.text("cpu.max") or "").partition(" ")
    # Without a quota it is -1, or max.
    if not quota or not quota.isdecimal() or int(quota) == 0:
        return None
    return int(quota) / (int(period) if period and period.isdecimal() and int(period) else _USUAL_PERIOD)
