"""A queue of kernel calls: they are added one by one, and made in their order by one native call.

A kernel reads more weights than the CPU's caches hold. Python that runs between two kernels therefore finds its own
data gone from them, and takes two to three times as long as in one piece; the kernels' threads wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of, call_kernel, called_as
from hetero_kv.cpu_ops.parallel_region import arguments_at, region_arguments
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time

#: Calls that a queue holds, and bytes of their arguments; a full queue is run.
_CALLS, _BYTES = 1024, 1 << 20
#: More bytes than the arguments of any kernel take.
_MOST_BYTES = 1 << 14
_PLACED = types.Array(types.int64, 2, "C")
_CALLER = types.float64(types.int64, types.int64)
#: The signatures of queued kernels by their text.
_SIGNATURES: dict[str, Any] = {}


@called_as("queued")
def _signature_of(name: str) -> Any:
    return _SIGNATURES[name]


@region_arguments("queued")
def _arguments_of(name: str) -> tuple[Any, ...]:
    return tuple(_SIGNATURES[name].args)


@called_as("caller")
def _signature_of_caller(_: str) -> Any:
    return _CALLER


@intrinsic(prefer_literal=True)
def _stored(typingctx, name, place, arguments):
    """Write a kernel's arguments, a tuple, to the address `place`; returns the number of bytes, a multiple of 8."""
    tuple_type = types.Tuple(_arguments_of(name.literal_value))
    if typingctx.can_convert(arguments, tuple_type) is None:
        raise TypeError(f"a kernel of {tuple_type} is queued with {arguments}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        stored_type = context.get_value_type(tuple_type)
        value = context.cast(builder, operands[2], signature.args[2], tuple_type)
        builder.store(value, builder.inttoptr(operands[1], stored_type.as_pointer()), align=8)
        return context.get_constant(types.int64, -(-context.get_abi_sizeof(stored_type) // 8) * 8)

    return types.int64(name, types.int64, arguments), codegen


class _Queued(NamedTuple):
    """A kernel that can be queued.

    Attributes:
        put: writes a call's arguments and addresses.
        addresses: of the function that calls the kernel with stored arguments, and of the kernel.
    """

    put: Any
    addresses: tuple[int, int]


@cache
def _functions(name: str) -> tuple[Any, int]:
    """The functions of a signature: one that stores arguments, and the address of one that calls with them."""
    code_version, returns = CODE_VERSION, _SIGNATURES[name].return_type != types.void

    @njit(cache=True)
    def put(placed, index, place, caller, kernel, arguments):
        placed[index, 0], placed[index, 1], placed[index, 2] = caller, kernel, place + 0 * code_version
        return place + _stored(name, place, arguments)

    @njit(_CALLER, cache=True, nogil=True)
    def call(kernel, place):
        status = call_kernel("queued", name, kernel, arguments_at("queued", name, place))
        return status + 0 * code_version if returns else np.float64(0 * code_version)

    return put, address_of(call)


@cache
def _queued(kernel: Any) -> _Queued:
    (arguments,) = kernel.signatures
    (compiled,) = kernel.overloads.values()
    signature = compiled.signature.return_type(*arguments)
    name = str(signature)
    _SIGNATURES[name] = signature
    put, caller = _functions(name)
    return _Queued(put, (caller, address_of(kernel)))


@cache
def _runner() -> Any:
    code_version = CODE_VERSION

    @njit(types.int64(_PLACED, types.int64, types.Array(types.float64, 1, "C")), cache=True, nogil=True)
    def run(placed, count, results):
        for index in range(count):
            results[index] = call_kernel("caller", "", placed[index, 0], (placed[index, 1], placed[index, 2]))
            if results[index] < 0:
                return index + 1
        return count + 0 * code_version

    return run


class _Memory(NamedTuple):
    """The memory of a queue.

    Attributes:
        placed: of each call, the address of its caller, of its kernel and of its arguments.
        results: of each call.
        arguments: of all calls.
        first, full: the address of the arguments, and that from which on no kernel's may fit.
    """

    placed: np.ndarray
    results: np.ndarray
    arguments: np.ndarray
    first: int
    full: int

    @classmethod
    def new(cls) -> _Memory:
        arguments = np.empty(_BYTES, np.uint8)
        first = arguments.ctypes.data
        full = first + _BYTES - _MOST_BYTES
        return cls(np.empty((_CALLS, 3), np.int64), np.empty(_CALLS, np.float64), arguments, first, full)


#: Memory for the next queues: fresh memory costs a page fault per 4 KiB.
_FREE: list[_Memory] = []


@cache
def prepare_queued(kernel: Any) -> None:
    """Compile what queues need for calls of a kernel with exactly the types of its signature."""
    put = _queued(kernel).put
    (arguments,) = kernel.signatures
    put.compile((_PLACED, *(types.int64,) * 4, types.Tuple(arguments)))
    _runner()


class KernelQueue:
    """Calls of kernels that wait for `run`, for one thread.

    An exception in `add` or `run` leaves the queue empty.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._place = 0
        # Arguments are addresses of arrays, which must outlive the call.
        self._arguments: list[tuple[Any, ...]] = []
        self._checks: list[tuple[int, Callable[[float], None]]] = []

    def add(self, kernel: Any, *arguments: Any, check: Callable[[float], None] | None = None) -> None:
        """Call a kernel later: one with a single signature, whose result is a number or nothing.

        check: called after the run with a result other than 0; it may raise an error. A negative result ends the run.
        """
        memory = self._memory
        if memory is None:
            memory = self._memory = _FREE.pop() if _FREE else _Memory.new()
            self._place = memory.first
        queued = _queued(kernel)
        kept = self._arguments
        self._place = queued.put(memory.placed, len(kept), self._place, *queued.addresses, arguments)
        if check is not None:
            self._checks.append((len(kept), check))
        kept.append(arguments)
        if len(kept) == _CALLS or self._place > memory.full:
            self.run()

    def run(self) -> None:
        """Make the calls, in their order."""
        kept, checks, memory = self._arguments, self._checks, self._memory
        if memory is None:
            return
        self._arguments, self._checks, self._memory = [], [], None
        with one_kernel_at_a_time:
            made = _runner()(memory.placed, len(kept), memory.results)
        results = memory.results[:made].tolist()
        _FREE.append(memory)
        for index, check in checks:
            if index < made and results[index]:
                check(results[index])
