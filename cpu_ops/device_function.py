"""Device functions: functions that only kernels call, compiled faster because Python cannot call them."""

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.registry import CPUDispatcher


def device_function(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function with `numba.njit` that only kernels call, never Python.

    Numba generates two wrappers for every compiled function, for Python and for C, and each unpacks all array
    arguments. Omitting the unused wrappers shortens the compilation of kernels with many parts.

    The returned function raises TypeError if Python calls it.
    """
    if function is None:
        return lambda decorated: device_function(decorated, **options)
    compiled = njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)
    compiled.__class__ = _DeviceFunction
    return compiled


class _DeviceFunction(CPUDispatcher):
    """Refuses calls from Python, for which there is no wrapper."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self.py_func.__name__} is compiled for kernels only, and cannot be called from Python")
