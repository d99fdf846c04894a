"""Kernels that call other kernels by address.

Numba compiles every kernel that a kernel calls by name into the caller, once for each combination. A kernel that takes
the address of another calls the compiled code, so that one caller serves every shape.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Signature = Callable[[str], Any]
"""Returns the numba signature of a kind of kernels for a storage type."""

_SIGNATURES: dict[str, Signature] = {}
_ADDRESSES: dict[Any, int] = {}
"""Addresses by kernel; the reference to a kernel keeps its code alive."""


def called_as(kind: str) -> Callable[[Signature], Signature]:
    """Register the decorated function as the `Signature` of kernels of `kind` for `call_kernel`."""

    def register(signature: Signature) -> Signature:
        _SIGNATURES[kind] = signature
        return signature

    return register


def address_of(kernel: Any) -> int:
    """Returns the permanent address of the code of a kernel that is compiled for exactly one signature.

    Raises ValueError for a kernel with none or several.
    """
    if len(kernel.overloads) != 1:
        compiled = len(kernel.overloads)
        raise ValueError(f"{kernel.py_func.__name__} has been compiled for {compiled} signatures, not for one")
    if kernel not in _ADDRESSES:
        (found,) = kernel.overloads.values()
        _ADDRESSES[kernel] = int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))
    return _ADDRESSES[kernel]


@intrinsic(prefer_literal=True)
def call_kernel(typingctx, kind, storage, address, arguments):
    """Call the kernel at `address`, of a registered kind and storage type, with a tuple of exactly its argument types.

    An exception in the callee propagates to the caller.
    """
    callee_type = _SIGNATURES[kind.literal_value](storage.literal_value)
    if tuple(arguments.types) != tuple(callee_type.args):
        raise TypeError(f"a kernel {kind.literal_value!r} of {callee_type} is called with {arguments}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        convention = context.call_conv
        function = convention.get_function_type(callee_type.return_type, callee_type.args)
        callee = builder.inttoptr(operands[2], function.as_pointer())
        passed = [builder.extract_value(operands[3], index) for index in range(len(callee_type.args))]
        status, result = convention.call_function(builder, callee, callee_type.return_type, callee_type.args, passed)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return result

    return callee_type.return_type(kind, storage, types.int64, arguments), codegen
