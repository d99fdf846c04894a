"""Functions that kernels alone call: compiled as others are, and refused to Python."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from hetero_kv.cpu_ops.device_function import device_function


@device_function(error_model="numpy")
def _ratio(numbers):
    return numbers[0] / numbers[1]


@njit
def _kernel(numbers):
    return _ratio(numbers) + 1


def test_a_kernel_calls_it_with_its_options():
    assert _kernel(np.array([3.0, 2.0])) == 2.5
    # Not ZeroDivisionError: the option is in force.
    assert _kernel(np.array([3.0, 0.0])) == np.inf


def test_python_is_refused_before_and_after_it_was_compiled():
    numbers = np.array([3.0, 2.0])

    @device_function
    def fresh(values):
        return values[0]

    with pytest.raises(TypeError, match="fresh is compiled for kernels only"):
        fresh(numbers)
    _kernel(numbers)
    assert _ratio.signatures
    with pytest.raises(TypeError, match="_ratio is compiled for kernels only"):
        _ratio(numbers)
