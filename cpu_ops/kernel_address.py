"""Kernels that call kernels by address.

Numba compiles into a kernel whatever other kernels it names, for every combination of them once more. A kernel that is
given another's address calls it as it was compiled: one caller serves every shape.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Signature = Callable[[str], Any]
"""The signature (numba's) that kernels of one kind have for a storage type."""

_SIGNATURES: dict[str, Signature] = {}
_ADDRESSES: dict[Any, int] = {}
"""Of kernels that were asked for, by the kernel, so that their code stays."""


def called_as(kind: str) -> Callable[[Signature], Signature]:
    """Have `call_kernel` call kernels of `kind` by the decorated function's signatures."""

    def register(signature: Signature) -> Signature:
        _SIGNATURES[kind] = signature
        return signature

    return register


def address_of(kernel: Any) -> int:
    """Where the code of a kernel lies that has been compiled for one signature, for good.

    Raises ValueError for one with none or several.
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
    """Call the kernel at `address`, of a registered kind for a storage type, with a tuple of exactly its types.

    An exception in the callee is one in the caller.
    """
    wanted = _SIGNATURES[kind.literal_value](storage.literal_value)
    if tuple(arguments.types) != tuple(wanted.args):
        raise TypeError(f"a kernel {kind.literal_value!r} of {wanted} is called with {arguments}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        convention = context.call_conv
        function = convention.get_function_type(wanted.return_type, wanted.args)
        callee = builder.inttoptr(given[2], function.as_pointer())
        passed = [builder.extract_value(given[3], index) for index in range(len(wanted.args))]
        status, result = convention.call_function(builder, callee, wanted.return_type, wanted.args, passed)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return result

    return wanted.return_type(kind, storage, types.int64, arguments), codegen
