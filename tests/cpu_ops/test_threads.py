"""How kernels get their threads."""

import os
import subprocess
import sys

import numba
import pytest

from cpu_ops.threads import kernel_threads


def spin_count(**settings):
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", "import cpu_ops, os; print(os.environ.get('GOMP_SPINCOUNT'))"]
    return subprocess.run(
        command, env=environment | settings, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_openmp_spins_briefly_unless_the_user_says_otherwise():
    assert spin_count() == "3000"
    assert spin_count(GOMP_SPINCOUNT="7") == "7"
    assert spin_count(OMP_WAIT_POLICY="active") == "None"


def test_the_number_of_threads_is_restored_after_a_kernel():
    before = numba.get_num_threads()
    with kernel_threads(1) as used:
        assert used == 1 == numba.get_num_threads()
    assert numba.get_num_threads() == before


def test_no_threads_at_all_is_an_error():
    with pytest.raises(ValueError, match="threads is 0; this process can use 1 to"), kernel_threads(0):
        pass
