"""Emits code that unpacks the weights of a tile to numbers, for every format."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.bfloat16_tiles import BFloat16
from hetero_kv.cpu_ops.group_codes import code_vectors, group_scales
from hetero_kv.cpu_ops.half_precision_weights import column_of
from hetero_kv.cpu_ops.vectors import array_pointer
from hetero_kv.cpu_ops.weight_codes import call_intrinsic
from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE, VECTORS, WeightFormat

_I64, _POINTER = ir.IntType(64), ir.IntType(8).as_pointer()
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), TILE), ir.VectorType(ir.IntType(32), TILE)


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


@contextmanager
def _each_group(
    builder: ir.IRBuilder, layout: WeightFormat, weights: ir.Value, columns: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Emit a loop over the groups of a tile at address `weights`; yields a group's first column, block and pointer."""
    first = builder.inttoptr(weights, _POINTER)
    with cgutils.for_range(builder, builder.udiv(columns, _int(layout.columns))) as blocks:
        block = builder.gep(first, [builder.mul(blocks.index, _int(layout.record_bytes))])
        with cgutils.for_range(builder, _int(layout.groups)) as groups:
            place = builder.add(builder.mul(groups.index, _int(layout.group_bytes)), _int(layout.head_bytes))
            index = builder.add(builder.mul(blocks.index, _int(layout.groups)), groups.index)
            yield builder.mul(index, _int(GROUP)), block, builder.gep(block, [place])


@intrinsic(prefer_literal=True)
def unpack_tile(typingctx, name, number, how, weights, out, out_stride, columns):
    """Unpack the tile at address `weights` to address `out`, sixteen numbers per column; out_stride in bytes."""
    layout, kind, instruction = FORMATS[name.literal_value], number.literal_value, how.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        weights, out, stride, columns = arguments[3:]
        element: ir.Type = {"float32": ir.FloatType(), "float16": ir.HalfType()}.get(kind, ir.IntType(16))
        base = builder.inttoptr(out, _POINTER)
        with _each_group(builder, layout, weights, columns) as (start, block, group):
            for k, values in enumerate(_columns(builder, layout, block, group, instruction)):
                target = builder.gep(base, [builder.mul(builder.add(start, _int(k)), stride)])
                target = builder.bitcast(target, ir.VectorType(element, TILE).as_pointer())
                builder.store(_as(builder, values, kind), target, align=2)
        return context.get_dummy_value()

    return types.none(name, number, how, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def unpack_words(typingctx, name, how, weights, columns, out, at, pitch):
    """Unpack `columns` columns of the tile at address `weights`, as an AMX product's second factor: words of two
    bfloat16 numbers, those of columns 2 k and 2 k + 1 of a row.

    out: uint32; word k of the tile's row r is at + k * pitch + r.
    """
    layout, instruction = FORMATS[name.literal_value], how.literal_value
    pairs = ir.VectorType(BFloat16(), 2 * TILE)
    alternating = ir.Constant(ir.VectorType(ir.IntType(32), 2 * TILE), [k // 2 + k % 2 * TILE for k in range(2 * TILE)])

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        base = array_pointer(context, builder, out, arguments[4], arguments[5])
        with _each_group(builder, layout, arguments[2], arguments[3]) as (start, block, group):
            line = builder.mul(builder.lshr(start, _int(1)), arguments[6])
            even = None
            for k, values in enumerate(_columns(builder, layout, block, group, instruction)):
                if even is None:
                    even = values
                    continue
                both = call_intrinsic(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, values, even)
                word = builder.add(line, builder.mul(_int(k // 2), arguments[6]))
                place = builder.bitcast(builder.gep(base, [word]), pairs.as_pointer())
                builder.store(builder.shuffle_vector(both, both, alternating), place, align=4)
                even = None
        return context.get_dummy_value()

    return types.none(name, how, *[types.int64] * 2, out, *[types.int64] * 2), codegen


def _columns(
    builder: ir.IRBuilder, layout: WeightFormat, block: ir.Value, group: ir.Value, how: str
) -> Iterator[ir.Value]:
    """Yields the 32 columns of a group, each a vector of sixteen numbers."""
    if layout.number:
        yield from (column_of(builder, group, layout.number, 2 * TILE * k) for k in range(GROUP))
        return
    scales, minimums = group_scales(builder, layout, block, group)
    codes_of = code_vectors(builder, layout, group, how)
    for vector in range(VECTORS):
        codes, part = codes_of(vector), vector * layout.parts // VECTORS
        lanes = builder.bitcast(codes, _INTS)
        for byte in range(4):
            values = builder.fmul(_number_of(builder, lanes, byte, layout), scales[part])
            yield builder.fadd(values, minimums[part]) if minimums else values


def _number_of(builder: ir.IRBuilder, codes: ir.Value, byte: int, layout: WeightFormat) -> ir.Value:
    """Returns the numbers for which byte `byte` of each of sixteen words of codes stands, without their scale.

    No conversion is needed: the bits of a code, put into the mantissa of a power of two, add the code to it.
    """

    def every(value: int) -> ir.Constant:
        return ir.Constant(_INTS, [value] * TILE)

    if layout.signed:
        codes = builder.xor(codes, every(0x80808080 - (1 << 32)))
    if byte > 1:
        codes, byte = builder.lshr(codes, every(16)), byte - 2
    exponent = 23 - 8 * byte
    bits = builder.or_(builder.and_(codes, every(255 << 8 * byte)), every(127 + exponent << 23))
    zero = 2.0**exponent + (128 if layout.signed else layout.zero)
    return builder.fsub(builder.bitcast(bits, _FLOATS), ir.Constant(_FLOATS, [zero] * TILE))


def _as(builder: ir.IRBuilder, values: ir.Value, kind: str) -> ir.Value:
    if kind == "float32":
        return values
    if kind == "float16":
        return builder.fptrunc(values, ir.VectorType(ir.HalfType(), TILE))
    bits = builder.bitcast(values, _INTS)

    def every(value: int) -> ir.Constant:
        return ir.Constant(_INTS, [value] * TILE)

    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, every(0x7FFF))), every(16))
    return builder.trunc(rounded, ir.VectorType(ir.IntType(16), TILE))
