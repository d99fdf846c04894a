"""Functions that kernels alone call: parts of them, which take Numba less time to compile than kernels do."""

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.registry import CPUDispatcher


def inner(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`numba.njit` of a function that kernels call, and Python never does.

    Numba makes two ways into every function that it compiles, from Python and from C, and each unpacks all arrays
    that the function takes. Without them, where nobody would go, a kernel of many parts compiles in less time.

    Raises TypeError where Python calls it.
    """
    if function is None:
        return lambda decorated: inner(decorated, **options)
    compiled = njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)
    compiled.__class__ = _Inner
    return compiled


class _Inner(CPUDispatcher):
    """Refuses to be called from Python, where there would be nothing to jump to."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self.py_func.__name__} is compiled for kernels alone, and has no way in from Python")
