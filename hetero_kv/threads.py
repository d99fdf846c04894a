"""Sets the number of compute threads, of torch's matrix products and of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Within this context the torch calls of this thread use no others.

    For many calls with some ten thousand numbers each: to wake another thread takes longer than it saves.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
