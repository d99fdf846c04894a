"""Device functions: functions that only kernels call, compiled faster because Python cannot call them.

Numba makes every function that it compiles ready to run: it generates two wrappers, for Python and for C, which unpack
all array arguments, and machine code. A kernel uses none of this. Its module contains the LLVM code of all functions
that it calls, and is optimized and compiled as a whole. Here a function is only made ready to be linked.
"""

from collections.abc import Callable
from typing import Any

from numba import _dynfunc, njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering


def device_function(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function with `numba.njit` that only kernels call, never Python.

    The returned function raises TypeError if Python calls it.
    """
    if function is None:
        return lambda decorated: device_function(decorated, **options)
    pipeline = options.pop("pipeline_class", _LinkedCompiler)
    compiled = njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=pipeline, **options)
    compiled.__class__ = _DeviceFunction
    return compiled


def kernel_part(function: Callable[..., Any]) -> Any:
    """A `device_function` that is optimized only as a part of the kernel, for functions of one kernel."""
    return device_function(function, pipeline_class=_PartCompiler)


class _DeviceFunction(CPUDispatcher):
    """Refuses calls from Python, for which there is no wrapper."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self.py_func.__name__} is compiled for kernels only, and cannot be called from Python")


class _LinkedLibrary(JITCodeLibrary):
    """LLVM code that is linked into kernels, and never becomes machine code of its own."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _PartLibrary(_LinkedLibrary):
    def _optimize_final_module(self) -> None:
        """Leaves everything to the kernel, which inlines this code."""


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    _name, library = "linked_lowering", _LinkedLibrary

    def run_pass(self, state: Any) -> bool:
        state.library = library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered, module = state["cr"], state["cr"].fndesc.lookup_module()
        # Numba looks functions up by an entry point, of which only the identity counts: this one has no code.
        entry = _dynfunc.make_function(module, state.func_id.func_name, "", 0, lowered.env, (library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(_LinkedLowering):
    _name, library = "part_lowering", _PartLibrary


class _LinkedCompiler(CompilerBase):
    lowering = _LinkedLowering

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        index = [each for each, _ in passes.passes].index(NativeLowering)
        passes.passes[index] = self.lowering, "lowering for linking"
        passes.finalize()
        return [passes]


class _PartCompiler(_LinkedCompiler):
    lowering = _PartLowering
