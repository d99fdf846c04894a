"""Conversions in kernels between float32 and an array's elements: float32, or the bits of bfloat16 as uint16."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from hetero_kv.cpu_ops.device_function import device_function

NUMBERS = {"float32": types.float32, "uint16": types.uint16}
"""numpy's names of the dtypes of a model's arrays: float32, and uint16 for the bits of bfloat16."""


@intrinsic
def bfloat16_to_float(typingctx, bits):
    """Returns the float32 of a bfloat16 whose bits are `bits`, uint16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_bfloat16(typingctx, number):
    """Round to nearest even; NaN stays NaN."""

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
    """Returns an array's element, float32 or the bits of bfloat16, as float32. For kernels only."""
    raise NotImplementedError("for kernels")


@overload(number, inline="always")
def _number_of(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: bfloat16_to_float(value)


def rounded(array: Any, value: Any) -> Any:
    """Returns a float32 as an element of `array`: float32, or the bits of bfloat16. For kernels only."""
    raise NotImplementedError("for kernels")


@overload(rounded, inline="always")
def _rounded_for(array, value):
    if isinstance(array.dtype, types.Float):
        return lambda array, value: value
    return lambda array, value: float_to_bfloat16(value)


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def round_row(numbers, target):
    """Write float32 numbers to target as the bits of bfloat16."""
    for d in range(numbers.size):
        target[d] = float_to_bfloat16(numbers[d])


@device_function(error_model="numpy")
def transpose_queries(q, head, depth, transposed):
    """Write the queries of a kv head as words, two neighbouring numbers each, with the queries in the lanes.

    q: [q_len, kv_heads, group, k_dim] float32, of bfloat16 numbers. transposed: uint32 [tiles * depth, columns]; a tile
    has `columns` queries, and `depth` words of each. What remains is 0.
    """
    bits, columns = q.view(np.uint32), transposed.shape[1]
    group = q.shape[2]
    transposed[:] = 0
    for n in range(q.shape[0] * group):
        for d in range(q.shape[3] // 2):
            low = bits[n // group, head, n % group, 2 * d] >> np.uint32(16)
            high = bits[n // group, head, n % group, 2 * d + 1] & np.uint32(0xFFFF0000)
            transposed[n // columns * depth + d, n % columns] = low | high
