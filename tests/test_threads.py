"""Torch and the kernels share one pool of threads."""

from __future__ import annotations

import numba
import numpy as np
import torch

from cpu_ops.attention import attend_blocks
from hetero_kv.threads import set_threads


def test_a_kernel_leaves_torch_the_number_of_threads_that_was_asked_for():
    before = torch.get_num_threads(), numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    q, pool = np.ones((1, 2, 2, 16), np.float32), np.ones((4, 2, 8, 16), np.float32)
    ids, counts = np.arange(4, dtype=np.int32)[None, None], np.full((1, 1), 4, np.int32)
    try:
        set_threads(1)
        attend_blocks(q, pool, pool, ids, counts, np.full(4, 8, np.int32), 0.25)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])
