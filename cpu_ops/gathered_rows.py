"""Copies vectors from any addresses to a kernel's contiguous buffer."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from hetero_kv.cpu_ops.vectors import array_pointer, integer, offset


@intrinsic
def row_address(typingctx, source, row, head, token):
    """Returns the address of source[row, head, token]; source has four dimensions with any strides."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        array = make_array(source)(context, builder, arguments[0])
        strides = cgutils.unpack_tuple(builder, array.strides)
        address = builder.ptrtoint(array.data, ir.IntType(64))
        for index, stride in zip(arguments[1:], strides, strict=False):
            address = builder.add(address, builder.mul(index, stride))
        return address

    at = types.int64
    return types.int64(source, at, at, at), codegen


@intrinsic(prefer_literal=True)
def copy_row(typingctx, size, address, target, at):
    """Copy `size` numbers from an address to offset `at` in the flat target."""
    count = size.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = array_pointer(context, builder, target, arguments[2], arguments[3])
        kind = ir.ArrayType(place.type.pointee, count)
        source = builder.inttoptr(arguments[1], kind.as_pointer())
        width = target.dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, builder.bitcast(place, kind.as_pointer()), source, integer(count * width), 1)
        return context.get_dummy_value()

    return types.none(size, types.int64, target, types.int64), codegen


@intrinsic(prefer_literal=True)
def pair_rows(typingctx, size, even, odd, target, at):
    """Interleave two vectors of `size` 16-bit numbers into words; the lower halves come from the address `even`."""
    count = size.literal_value
    lanes = 16
    shorts, words = (ir.VectorType(ir.IntType(bits), lanes) for bits in (16, 32))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = array_pointer(context, builder, target, arguments[3], arguments[4])
        half = ir.IntType(16).as_pointer()
        lower, upper = (builder.inttoptr(each, half) for each in arguments[1:3])
        for start in range(0, count, lanes):
            low, high = (
                builder.zext(
                    builder.load(builder.bitcast(offset(builder, p, start), shorts.as_pointer()), align=2), words
                )
                for p in (lower, upper)
            )
            word = builder.or_(low, builder.shl(high, ir.Constant(words, [16] * lanes)))
            builder.store(word, builder.bitcast(offset(builder, place, start), words.as_pointer()), align=4)
        return context.get_dummy_value()

    at64 = types.int64
    return types.none(size, at64, at64, target, at64), codegen
