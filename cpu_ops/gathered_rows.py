"""Copies vectors from any addresses to a kernel's contiguous buffer, also from stored numbers to bfloat16."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from hetero_kv.cpu_ops.storage import STORAGE_TYPES
from hetero_kv.cpu_ops.vectors import array_pointer, integer, offset

_LANES = 16
_SHORTS, _WORDS = (ir.VectorType(ir.IntType(bits), _LANES) for bits in (16, 32))
_SHORT_POINTER = ir.IntType(16).as_pointer()


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

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = array_pointer(context, builder, target, arguments[3], arguments[4])
        half = ir.IntType(16).as_pointer()
        lower, upper = (builder.inttoptr(each, half) for each in arguments[1:3])
        for start in range(0, count, _LANES):
            low, high = (
                builder.zext(
                    builder.load(builder.bitcast(offset(builder, p, start), _SHORTS.as_pointer()), align=2), _WORDS
                )
                for p in (lower, upper)
            )
            word = builder.or_(low, builder.shl(high, _everywhere(16)))
            builder.store(word, builder.bitcast(offset(builder, place, start), _WORDS.as_pointer()), align=4)
        return context.get_dummy_value()

    at64 = types.int64
    return types.none(size, at64, at64, target, at64), codegen


@intrinsic(prefer_literal=True)
def round_to_words(typingctx, storage, size, address, target, at):
    """Round `size` numbers at an address, of the named storage type, to bfloat16; two are a word of the target.

    The storage type has groups of one number. size: a multiple of 16.
    """
    name, count = storage.literal_value, size.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = builder.bitcast(array_pointer(context, builder, target, arguments[3], arguments[4]), _SHORT_POINTER)
        for start in range(0, count, _LANES):
            word = _rounded(builder, name, arguments[2], start)
            shorts = builder.trunc(builder.lshr(word, _everywhere(16)), _SHORTS)
            builder.store(shorts, builder.bitcast(offset(builder, place, start), _SHORTS.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.none(storage, size, types.int64, target, types.int64), codegen


@intrinsic(prefer_literal=True)
def round_to_pairs(typingctx, storage, size, even, odd, target, at):
    """`pair_rows` of two vectors of numbers that are rounded to bfloat16, as by `round_to_words`."""
    name, count = storage.literal_value, size.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = array_pointer(context, builder, target, arguments[4], arguments[5])
        for start in range(0, count, _LANES):
            low, high = (_rounded(builder, name, address, start) for address in arguments[2:4])
            word = builder.or_(builder.lshr(low, _everywhere(16)), high)
            builder.store(word, builder.bitcast(offset(builder, place, start), _WORDS.as_pointer()), align=4)
        return context.get_dummy_value()

    at64 = types.int64
    return types.none(storage, size, at64, at64, target, at64), codegen


def _everywhere(word: int) -> ir.Constant:
    return ir.Constant(_WORDS, [word] * _LANES)


def _rounded(builder: ir.IRBuilder, storage: str, address: ir.Value, start: int) -> ir.Value:
    """The bits of 16 numbers from number `start` on, rounded to bfloat16, in the upper halves of words.

    Ties are rounded away from zero; bfloat16 numbers that were stored in float16 are not rounded.
    """
    kind = STORAGE_TYPES[storage]
    at = builder.add(address, integer(start * kind.dtype.itemsize))
    numbers = builder.inttoptr(at, ir.IntType(8 * kind.kernel_dtype.itemsize).as_pointer())
    bits = builder.bitcast(kind.decode(builder, numbers, 0, _LANES), _WORDS)
    return builder.and_(builder.add(bits, _everywhere(0x8000)), _everywhere(0xFFFF0000))
