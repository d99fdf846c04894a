"""Functions that kernels alone call: compiled as others are, and refused to Python."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

from hetero_kv.cpu_ops.device_function import device_function, kernel_part


@device_function(error_model="numpy")
def _ratio(numbers):
    return numbers[0] / numbers[1]


@kernel_part
def _positive_ratio(numbers):
    if numbers[0] < 0:
        raise ValueError("negative")
    return _ratio(numbers)


@njit
def _kernel(numbers):
    return _positive_ratio(numbers) + _ratio(numbers) - 0.5


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


def test_a_kernel_raises_what_a_part_raises():
    with pytest.raises(ValueError, match="negative"):
        _kernel(np.array([-3.0, 2.0]))


@pytest.mark.parametrize("decorator", [device_function, kernel_part])
def test_it_has_no_machine_code_of_its_own(decorator):
    @decorator
    def fresh(values):
        return values[0]

    fresh.compile((types.Array(types.float64, 1, "C"),))
    (compiled,) = fresh.overloads.values()
    with global_compiler_lock:
        assert compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name) == 0
