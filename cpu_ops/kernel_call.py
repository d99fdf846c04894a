"""Calls a kernel that divides its work among threads."""

from typing import Any

from numba import get_num_threads, set_num_threads

from cpu_ops.threads import one_kernel_at_a_time, use_threads


def on_threads(threads: int | None, kernel: Any, *arguments: Any) -> Any:
    """Call `kernel(*arguments, threads)` while no other kernel runs, and return its result.

    threads: number of threads (None: Numba's setting). Does the same as `kernel_threads` in one frame, because it runs
    for every layer of every token. Raises ValueError for more threads than there are, TypeError for arguments that are
    not of the kernel's types.
    """
    with one_kernel_at_a_time:
        before = get_num_threads()
        used = before if threads is None or threads == before else use_threads(threads)
        try:
            return kernel(*arguments, used)
        finally:
            if used != before:
                set_num_threads(before)
