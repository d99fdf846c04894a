"""Work that a kernel divides among threads: functions compiled apart, run by one loop over threads for all of them.

Numba's own `parallel=True` takes longer to compile a kernel than LLVM does: it looks for loops to fuse in all of it,
and compiles its parallel loops once more as functions of their own. Here the part that every thread runs is compiled as
any other function, `region(thread, threads, arguments)`, whose arguments lie in memory; the only kernel with a parallel
loop calls it by its address.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.kernel_address import address_of, call_kernel, called_as

REGION = types.int64(types.int64, types.int64, types.int64)
"""Of regions: (thread, threads, address of the arguments) to 0."""

_ARGUMENTS: dict[str, Callable[[str], tuple[Any, ...]]] = {}


def region_arguments(kind: str) -> Callable[[Callable[[str], tuple[Any, ...]]], Callable[[str], tuple[Any, ...]]]:
    """Have regions of `kind` take arguments of the types that the decorated function gives for a variant's name."""

    def register(arguments: Callable[[str], tuple[Any, ...]]) -> Callable[[str], tuple[Any, ...]]:
        _ARGUMENTS[kind] = arguments
        return arguments

    return register


@called_as("region")
def _region_signature(_: str) -> Any:
    return REGION


@called_as("all threads")
def _all_threads_signature(_: str) -> Any:
    return types.int64(types.int64, types.int64, types.int64)


@cache
def all_threads() -> int:
    """The address of the kernel that runs a region on all threads: what `run_region` takes first."""
    code_version = CODE_VERSION

    @njit(_all_threads_signature(""), parallel=True, cache=True, nogil=True)
    def run(region, threads, arguments):
        # Numba counts the threads of a parallel loop without a sign.
        for thread in prange(threads):
            call_kernel("region", "", region, (np.int64(thread), threads, arguments))
        return 0 * code_version

    return address_of(run)


@intrinsic(prefer_literal=True)
def run_region(typingctx, kind, variant, run, region, threads, arguments):
    """Call the region at address `region` once for each of the threads 0 to `threads` - 1, and wait for all.

    kind, variant: literal, of `region_arguments`. run: `all_threads()`. arguments: a tuple of the types that were
    registered; arrays stay where they are.
    """
    wanted = types.Tuple(_ARGUMENTS[kind.literal_value](variant.literal_value))
    given_types = tuple(types.unliteral(each) for each in arguments.types)
    if given_types != wanted.types:
        raise TypeError(f"a region {kind.literal_value!r} of {wanted} is called with {arguments}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        place = cgutils.alloca_once(builder, context.get_value_type(wanted))
        builder.store(context.cast(builder, given[5], arguments, wanted), place)
        convention = context.call_conv
        function = convention.get_function_type(types.int64, REGION.args)
        caller = builder.inttoptr(given[2], function.as_pointer())
        passed = [given[3], given[4], builder.ptrtoint(place, ir.IntType(64))]
        status, result = convention.call_function(builder, caller, types.int64, REGION.args, passed)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return result

    return types.int64(kind, variant, types.int64, types.int64, types.int64, arguments), codegen


@intrinsic(prefer_literal=True)
def arguments_at(typingctx, kind, variant, address):
    """The tuple of a region's arguments. Its arrays are the caller's, and nobody counts that they are used here."""
    wanted = types.Tuple(_ARGUMENTS[kind.literal_value](variant.literal_value))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        value = builder.load(builder.inttoptr(given[2], context.get_value_type(wanted).as_pointer()))
        for index, kind_of in enumerate(wanted.types):
            if isinstance(kind_of, types.Array):
                array = cgutils.create_struct_proxy(kind_of)(context, builder, builder.extract_value(value, index))
                array.meminfo = cgutils.get_null_value(array.meminfo.type)
                array.parent = cgutils.get_null_value(array.parent.type)
                value = builder.insert_value(value, array._getvalue(), index)
        return value

    return wanted(kind, variant, types.int64), codegen


@cache
def _caller(kind: str, variant: str) -> Any:
    code_version = CODE_VERSION
    given = types.Tuple(_ARGUMENTS[kind](variant))

    @njit(types.int64(types.int64, types.int64, given, types.int64), cache=True, nogil=True)
    def call(run, region, arguments, threads):
        return run_region(kind, variant, run, region, threads, arguments) + 0 * code_version

    return call


def call_region(kind: str, variant: str, region: int, arguments: tuple[Any, ...], threads: int) -> None:
    """Run the region at address `region` on so many threads. For who holds `threads.one_kernel_at_a_time`.

    arguments: of the types that were registered for `kind` and `variant`, or TypeError.
    """
    _caller(kind, variant)(all_threads(), region, arguments, threads)
