"""Quantizes activations to int8 with one float32 scale per 32 columns, the input of products with quantized weights."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from hetero_kv.cpu_ops.weight_formats import GROUP

_LARGEST = 127.0
_I8, _I32, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()


@intrinsic
def quantize_group(typingctx, x, x_at, codes, codes_at, scales, scales_at, sums, sums_at):
    """Quantize 32 numbers of x to int8 codes; write their scale and the sums of the first and of the last 16 codes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def pointer(index: int) -> ir.Value:
            array = make_array(signature.args[index])(context, builder, arguments[index])
            return builder.gep(array.data, [arguments[index + 1]])

        def call(name: str, kind: ir.Type, *operands: ir.Value, **flags: Any) -> ir.Value:
            function_type = ir.FunctionType(kind, [operand.type for operand in operands])
            return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), operands, **flags)

        floats, ints = ir.VectorType(_FLOAT, GROUP), ir.VectorType(_I32, GROUP)
        bytes_ = ir.VectorType(_I8, GROUP)
        values = builder.load(builder.bitcast(pointer(0), floats.as_pointer()), align=4, typ=floats)
        # Magnitudes compare alike as integers, and NaN is above infinity.
        magnitudes = builder.and_(builder.bitcast(values, ints), ir.Constant(ints, [0x7FFFFFFF] * GROUP))
        largest = builder.bitcast(call("llvm.vector.reduce.umax.v32i32", _I32, magnitudes), _FLOAT)
        scale = builder.fmul(largest, ir.Constant(_FLOAT, np.float32(1 / _LARGEST)))
        builder.store(scale, pointer(4))
        positive = builder.fcmp_ordered(">", scale, ir.Constant(_FLOAT, 0.0))
        inverse = builder.select(positive, builder.fdiv(ir.Constant(_FLOAT, 1.0), scale), ir.Constant(_FLOAT, 0.0))
        spread = builder.insert_element(ir.Constant(floats, ir.Undefined), inverse, ir.Constant(_I32, 0))
        mask = ir.Constant(ints, [0] * GROUP)
        spread = builder.shuffle_vector(spread, ir.Constant(floats, ir.Undefined), mask)
        rounded = call("llvm.rint.v32f32", floats, builder.fmul(values, spread))
        # The scale carries NaN and infinity into the result; their codes are 0. LLVM converts a vector with its
        # saturating conversion number by number.
        none, most = ir.Constant(floats, [0.0] * GROUP), ir.Constant(floats, [_LARGEST] * GROUP)
        distance = call("llvm.fabs.v32f32", floats, rounded)
        whole = builder.fptosi(builder.select(builder.fcmp_ordered("<=", distance, most), rounded, none), ints)
        builder.store(builder.trunc(whole, bytes_), builder.bitcast(pointer(2), bytes_.as_pointer()), align=1)
        half = ir.VectorType(_I32, GROUP // 2)
        for part in range(2):
            picked = ir.Constant(half, list(range(part * GROUP // 2, (part + 1) * GROUP // 2)))
            total = call("llvm.vector.reduce.add.v16i32", _I32, builder.shuffle_vector(whole, whole, picked))
            builder.store(total, builder.gep(pointer(6), [ir.Constant(_I32, part)]))
        return context.get_dummy_value()

    return types.none(x, types.int64, codes, types.int64, scales, types.int64, sums, types.int64), codegen


@njit(nogil=True)
def quantize_rows(x, codes, scales, sums):
    """Quantize x [rows, columns] float32, columns a multiple of 32, for `cpu_ops.weight_dots`.

    Writes codes [rows, columns] int8, scales [rows, columns / 32] float32 (the largest magnitude of each 32 columns
    divided by 127) and sums [rows, columns / 16] int32 (of each 16 codes). A group of zeros has the scale 0. A group
    with a NaN or an infinity has that as its scale, so that the product is not finite either.
    """
    groups = x.shape[1] // GROUP
    for row in range(x.shape[0]):
        for group in range(groups):
            at = row * groups + group
            quantize_group(x, at * GROUP, codes, at * GROUP, scales, at, sums, at * 2)
