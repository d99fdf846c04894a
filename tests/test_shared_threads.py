"""Torch and the kernels share one pool of threads."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest

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
