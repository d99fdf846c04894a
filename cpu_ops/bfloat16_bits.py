"""Conversions in kernels between float32 and an array's elements: float32, or the bits of bfloat16 as uint16."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.vectors import array_pointer, offset

_LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)

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
        return _rounded(builder, arguments[0])

    return types.uint16(types.float32), codegen


@intrinsic(prefer_literal=True)
def round_numbers(typingctx, size, numbers, n_at, bits, b_at):
    """Round `size` float32 numbers from n_at on, a multiple of 16, as `float_to_bfloat16`; write bits from b_at on.

    Both arrays are C-contiguous, and places count from their first element. In a loop over few numbers, checks of each
    place would take most of the time.
    """
    count = size.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        source = array_pointer(context, builder, numbers, arguments[1], arguments[2])
        target = array_pointer(context, builder, bits, arguments[3], arguments[4])
        for start in range(0, count, _LANES):
            place = builder.bitcast(offset(builder, source, start), _FLOATS.as_pointer())
            found = _rounded(builder, builder.load(place, align=4, typ=_FLOATS))
            builder.store(found, builder.bitcast(offset(builder, target, start), found.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.none(size, numbers, types.int64, bits, types.int64), codegen


def _rounded(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """The bits of a float32, or of a vector of these, as bfloat16."""
    lanes = numbers.type.count if isinstance(numbers.type, ir.VectorType) else 0

    def like(kind: ir.Type) -> ir.Type:
        return ir.VectorType(kind, lanes) if lanes else kind

    word = like(ir.IntType(32))

    def every(value: int) -> ir.Constant:
        return ir.Constant(word, [value] * lanes if lanes else value)

    bits = builder.bitcast(numbers, word)
    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    chosen = builder.select(is_nan, every(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(chosen, every(16)), like(ir.IntType(16)))


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
