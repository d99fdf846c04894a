"""How many threads compute: torch's matrix products and the kernels, which share one OpenMP pool."""

from __future__ import annotations

import numba
import torch

from cpu_ops.threads import at_most


def set_threads(threads: int) -> None:
    """Let torch and the kernels that are called from here use `threads` threads from now on.

    A kernel that nobody told runs on as many as Numba is set to; and as the pool is torch's too, that becomes torch's
    number.
    """
    # First: it starts Numba's threads, which have torch use as many.
    numba.set_num_threads(at_most(threads))
    torch.set_num_threads(threads)
