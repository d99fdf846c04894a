"""The number of threads of kernels."""

import numba
import pytest

from hetero_kv.cpu_ops.threads import kernel_threads


def test_the_number_of_threads_is_restored_after_a_kernel():
    before = numba.get_num_threads()
    with kernel_threads(1) as used:
        assert used == 1 == numba.get_num_threads()
    assert numba.get_num_threads() == before


def test_no_threads_at_all_is_an_error():
    with pytest.raises(ValueError, match="threads is 0; this process can use 1 to"), kernel_threads(0):
        pass
