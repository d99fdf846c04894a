"""Emits atomic operations of memory that threads share, a pause for threads that spin, and Linux's futex."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_MACHINE = platform.machine()
#: The number of the system call futex, by machine.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE)
#: The operations of `futex`, for threads of one process.
WAIT, WAKE = 128, 129


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def load_atomic(typingctx, address):
    """The int64 at an address, read atomically, after everything that its writer wrote before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        return builder.load_atomic(_pointer(builder, operands[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_atomic(typingctx, address, value):
    """Write an int64 atomically, after everything that this thread wrote before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        builder.store_atomic(operands[1], _pointer(builder, operands[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def add_atomic(typingctx, address, value):
    """Add to an int64 atomically; returns the sum."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        before = builder.atomic_rmw("add", _pointer(builder, operands[0]), operands[1], "seq_cst")
        return builder.add(before, operands[1])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Let the core's other hardware thread run for a moment."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        is_arm = _MACHINE == "aarch64"
        name = "llvm.aarch64.hint" if is_arm else "llvm.x86.sse2.pause"
        kind = ir.FunctionType(ir.VoidType(), [_I32] if is_arm else [])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [ir.Constant(_I32, 1)] if is_arm else [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def futex(typingctx, address, operation, value):
    """The system call of this name: sleep while the int32 at an address is `value`, or wake who sleeps there."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        zero = ir.Constant(_I64, 0)
        return builder.call(function, [ir.Constant(_I64, FUTEX), *operands, zero, zero, zero])

    return types.int64(types.int64, types.int64, types.int64), codegen
