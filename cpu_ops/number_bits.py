"""Numbers in kernels, whatever an array holds: float32, or bfloat16, whose bits numpy sees as uint16."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from cpu_ops.inner import inner


@intrinsic
def bfloat16_to_float(typingctx, bits):
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_bfloat16(typingctx, number):
    """To nearest even; NaN stays NaN."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        chosen = builder.select(is_nan, ir.Constant(word, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(chosen, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32), codegen


def number(value: Any) -> Any:
    """A float32 of what an array of float32 or of bfloat16's bits holds."""
    raise NotImplementedError("for kernels")


@overload(number, inline="always")
def _number_of(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: bfloat16_to_float(value)


def rounded(array: Any, value: Any) -> Any:
    """A float32 as an array's elements are: bfloat16's bits where it holds those."""
    raise NotImplementedError("for kernels")


@overload(rounded, inline="always")
def _rounded_for(array, value):
    if isinstance(array.dtype, types.Float):
        return lambda array, value: value
    return lambda array, value: float_to_bfloat16(value)


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def round_row(numbers, target):
    """Write float32 numbers as bfloat16's bits."""
    for d in range(numbers.size):
        target[d] = float_to_bfloat16(numbers[d])
