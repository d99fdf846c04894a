"""Thread settings by which kernels share the cores with torch.

Kernels run on a team of threads (`thread_team`), and torch's matrix products on an OpenMP pool. Both leave the cores to
each other soon after each call. Numba's own parallel loops take the `omp` layer, which binds to the OpenMP runtime of
the process, so that they run on torch's threads. Without an OpenMP runtime, Numba falls back to the other layers.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba import get_num_threads, set_num_threads

if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

#: Concurrent kernels gain nothing, because one uses all its cores, and some threading layers crash with two callers.
one_kernel_at_a_time = threading.Lock()


def at_most(threads: int) -> int:
    """Returns `threads`, limited to the number that this process can use (NUMBA_NUM_THREADS)."""
    return min(threads, numba.config.NUMBA_NUM_THREADS)


def use_threads(threads: int) -> int:
    """Set the number of threads of kernels, and return it. The caller must own `one_kernel_at_a_time`.

    Raises ValueError if it is not between 1 and the number of threads that Numba started with.
    """
    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= threads <= most:
        raise ValueError(f"threads is {threads}; this process can use 1 to {most} (NUMBA_NUM_THREADS)")
    numba.set_num_threads(threads)
    return threads


@contextmanager
def kernel_threads(threads: int | None) -> Iterator[int]:
    """Reserve the cores for one kernel call with `threads` threads (None: Numba's setting); yields their number.

    Raises ValueError if `threads` is not between 1 and the number of threads that Numba started with.
    """
    with one_kernel_at_a_time:
        before = numba.get_num_threads()
        used = before if threads is None or threads == before else use_threads(threads)
        try:
            yield used
        finally:
            if used != before:
                numba.set_num_threads(before)


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
