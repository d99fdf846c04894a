"""Parallel regions: functions that every thread runs, compiled separately and called by one loop over threads.

Numba's `parallel=True` takes longer to compile a kernel than LLVM does: it searches the whole kernel for loops to fuse,
and compiles each parallel loop again as a separate function. Here the part that every thread runs is an ordinary
function `region(thread, threads, arguments)`, whose arguments are in memory. A single kernel calls all regions by
address, on the threads of a team (`thread_team`), or where there is none in a parallel loop on OpenMP's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of, call_kernel, called_as
from hetero_kv.cpu_ops.thread_team import REGION, is_supported, team

_ARGUMENTS: dict[str, Callable[[str], tuple[Any, ...]]] = {}


def region_arguments(kind: str) -> Callable[[Callable[[str], tuple[Any, ...]]], Callable[[str], tuple[Any, ...]]]:
    """Register the decorated function, which returns the argument types of regions of `kind` for a variant's name."""

    def register(arguments: Callable[[str], tuple[Any, ...]]) -> Callable[[str], tuple[Any, ...]]:
        _ARGUMENTS[kind] = arguments
        return arguments

    return register


@called_as("region")
def _region_signature(_: str) -> Any:
    return REGION


@cache
def all_threads() -> int:
    """Returns the address of the kernel that runs a region on all threads, the argument `run` of `run_region`."""
    return team() if is_supported() else openmp_threads()


@cache
def openmp_threads() -> int:
    """As `all_threads`, on OpenMP's threads, for systems without a team."""
    code_version = CODE_VERSION

    @njit(REGION, parallel=True, cache=True, nogil=True)
    def run(region, threads, arguments):
        # The index of Numba's parallel loops is unsigned.
        for thread in prange(threads):
            call_kernel("region", "", region, (np.int64(thread), threads, arguments))
        return 0 * code_version

    return address_of(run)


@intrinsic(prefer_literal=True)
def run_region(typingctx, kind, variant, run, region, threads, arguments):
    """Call the region at address `region` once for each of the threads 0 to `threads` - 1, and wait for all.

    kind, variant: literals, as registered by `region_arguments`. run: `all_threads()`. arguments: a tuple of the
    registered types; arrays are not copied.
    """
    tuple_type = types.Tuple(_ARGUMENTS[kind.literal_value](variant.literal_value))
    argument_types = tuple(types.unliteral(each) for each in arguments.types)
    if argument_types != tuple_type.types:
        raise TypeError(f"a region {kind.literal_value!r} of {tuple_type} is called with {arguments}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        place = cgutils.alloca_once(builder, context.get_value_type(tuple_type))
        builder.store(context.cast(builder, operands[5], arguments, tuple_type), place)
        convention = context.call_conv
        function = convention.get_function_type(types.int64, REGION.args)
        caller = builder.inttoptr(operands[2], function.as_pointer())
        passed = [operands[3], operands[4], builder.ptrtoint(place, ir.IntType(64))]
        status, result = convention.call_function(builder, caller, types.int64, REGION.args, passed)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return result

    return types.int64(kind, variant, types.int64, types.int64, types.int64, arguments), codegen


@intrinsic(prefer_literal=True)
def arguments_at(typingctx, kind, variant, address):
    """Returns the tuple of a region's arguments. Its arrays are borrowed from the caller, without reference counts."""
    tuple_type = types.Tuple(_ARGUMENTS[kind.literal_value](variant.literal_value))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        value = builder.load(builder.inttoptr(operands[2], context.get_value_type(tuple_type).as_pointer()))
        return _borrowed(context, builder, tuple_type, value)

    return tuple_type(kind, variant, types.int64), codegen


def _borrowed(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    """A value whose arrays have no owner; kind: its type, an array's, a tuple's or a number's."""
    if isinstance(kind, types.Array):
        array = cgutils.create_struct_proxy(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for index, each in enumerate(kind):
            part = _borrowed(context, builder, each, builder.extract_value(value, index))
            value = builder.insert_value(value, part, index)
    return value


@cache
def _caller(kind: str, variant: str) -> Any:
    code_version = CODE_VERSION
    tuple_type = types.Tuple(_ARGUMENTS[kind](variant))

    @njit(types.int64(types.int64, types.int64, tuple_type, types.int64), cache=True, nogil=True)
    def call(run, region, arguments, threads):
        return run_region(kind, variant, run, region, threads, arguments) + 0 * code_version

    return call


def compile_call(kind: str, variant: str) -> None:
    """Compile what `call_region` calls, or load it from Numba's on-disk cache."""
    _caller(kind, variant)


def call_region(kind: str, variant: str, region: int, arguments: tuple[Any, ...], threads: int) -> None:
    """Run the region at address `region` on `threads` threads. The caller must own `threads.one_kernel_at_a_time`.

    Raises TypeError for arguments that are not of the types registered for `kind` and `variant`.
    """
    _caller(kind, variant)(all_threads(), region, arguments, threads)
