"""Sets the number of compute threads, of torch's matrix products and of the kernels."""

from __future__ import annotations

import numba
import torch

from hetero_kv.cpu_ops.threads import at_most


def set_threads(threads: int) -> None:
    """Set the number of threads of torch, and of the kernels that this thread calls, to `threads`.

    Without this, a kernel runs on Numba's default number. Numba's parallel loops run on torch's pool, so that this
    number would become torch's.
    """
    # First: this starts Numba's threads, which sets torch's number to Numba's.
    numba.set_num_threads(at_most(threads))
    torch.set_num_threads(threads)
