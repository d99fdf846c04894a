"""Scratch memory of kernels is aligned to cache lines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.cpu_ops.cache_lines import LINE, neighbours_on_lines, on_lines
from hetero_kv.cpu_ops.scratch import scratch


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.int64])
@given(shape=st.lists(st.integers(0, 20), min_size=1, max_size=4).map(tuple))
def test_memory_begins_on_a_line(dtype, shape):
    kept = [on_lines(shape, dtype) for _ in range(3)]
    for each in kept:
        assert (each.shape, each.dtype, each.flags.c_contiguous) == (shape, dtype, True)
        assert not each.size or each.ctypes.data % LINE == 0
        each[:] = 1


@given(rows=st.integers(1, 20), columns=st.integers(1, 40))
def test_scratch_is_zeros_on_a_line(rows, columns):
    memory = scratch(rows, columns)
    assert memory.shape == (rows, columns)
    assert memory.ctypes.data % LINE == 0
    assert not memory.any()


def test_contiguous_arrays_are_not_copied_and_others_are_copied_to_cache_lines():
    array = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    assert neighbours_on_lines(array) is array
    turned = neighbours_on_lines(array.transpose(1, 0, 2))
    assert turned.flags.c_contiguous
    assert turned.ctypes.data % LINE == 0
    np.testing.assert_array_equal(turned, array.transpose(1, 0, 2))
