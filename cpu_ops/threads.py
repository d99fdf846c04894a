"""How kernels share the cores with torch.

torch runs matrix products on an OpenMP pool whose threads keep spinning for a while after each one. A second pool on
the same cores would wait for those; Numba's `omp` layer binds to the OpenMP runtime that the process already has, so
that kernels run on torch's own threads. Where no OpenMP runtime is found, Numba falls back to the other layers.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba

if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

#: A kernel uses every core it is given, so two at once gain nothing; and not every layer survives two callers.
one_kernel_at_a_time = threading.Lock()


def at_most(threads: int) -> int:
    """`threads`, or as many as this process can use where that is fewer (NUMBA_NUM_THREADS)."""
    return min(threads, numba.config.NUMBA_NUM_THREADS)


def use_threads(threads: int) -> int:
    """Let kernels use `threads` threads from now on; returns the number. For who holds `one_kernel_at_a_time`.

    Raises ValueError when it is not between 1 and the number of threads Numba started with.
    """
    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= threads <= most:
        raise ValueError(f"threads is {threads}; this process can use 1 to {most} (NUMBA_NUM_THREADS)")
    numba.set_num_threads(threads)
    return threads


@contextmanager
def kernel_threads(threads: int | None) -> Iterator[int]:
    """Hold the cores for one kernel call, on `threads` threads (None: as many as Numba is set to); yields the number.

    Raises ValueError when `threads` is not between 1 and the number of threads Numba started with.
    """
    with one_kernel_at_a_time:
        before = numba.get_num_threads()
        used = before if threads is None or threads == before else use_threads(threads)
        try:
            yield used
        finally:
            if used != before:
                numba.set_num_threads(before)
