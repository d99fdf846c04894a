"""Torch and the kernels share one pool of threads."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest
import torch

from hetero_kv.threads import one_torch_thread

# Fresh, for the pool is started once: by the first kernel.
PROGRAM = """
import numpy as np, torch
from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.threads import set_threads
set_threads(1)
before = torch.get_num_threads()
q, pool = np.ones((1, 2, 2, 16), np.float32), np.ones((4, 2, 8, 16), np.float32)
ids, counts = np.arange(4, dtype=np.int32)[None, None], np.full((1, 1), 4, np.int32)
attend_blocks(q, pool, pool, ids, counts, np.full(4, 8, np.int32), 0.25)
print(before, torch.get_num_threads())
"""


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="this machine has one core")
def test_a_kernel_leaves_torchs_number_of_threads_unchanged(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_torch_uses_one_thread_within_the_context_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), one_torch_thread():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
