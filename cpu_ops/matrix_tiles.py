"""Products of small float32 matrices in registers, for kernels with many queries per stored token."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.storage import STORAGE_TYPES
from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, integer, offset


def emit_multiply_tile(
    v: Vectors, rows: int, columns: int, adds: bool, a: ir.Value, a_row: ir.Value, a_depth: ir.Value, depth: ir.Value,
    b: ir.Value, b_depth: ir.Value, c: ir.Value, c_row: ir.Value,
) -> None:  # fmt: skip
    """Emit the code of `multiply_tile`, on pointers."""
    builder = v.builder
    cells = [(r, j) for r in range(rows) for j in range(columns)]
    targets = [offset(builder, offset(builder, c, builder.mul(c_row, integer(r))), j * v.lanes) for r, j in cells]
    sums = v.slots([v.load(target) if adds else v.zero for target in targets])
    with cgutils.for_range(builder, depth) as loop:
        b_start = offset(builder, b, builder.mul(loop.index, b_depth))
        vectors = [v.load(offset(builder, b_start, j * v.lanes)) for j in range(columns)]
        a_start = offset(builder, a, builder.mul(loop.index, a_depth))
        for r in range(rows):
            factor = v.broadcast(offset(builder, a_start, builder.mul(a_row, integer(r))))
            for j in range(columns):
                cell = sums[r * columns + j]
                builder.store(v.call("fmuladd", factor, vectors[j], builder.load(cell)), cell)
    for cell, target in zip(sums, targets, strict=True):
        v.store(builder.load(cell), target)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typingctx, lanes, rows, columns, adds, a, a_at, a_row, a_depth, depth, b, b_at, b_depth, c, c_at, c_row
):
    """Compute c = a b, or c += a b if the literal `adds` is 1, for `rows` rows of a and `columns` vectors of b columns.

    Element (r, i) of a is at a_at + r * a_row + i * a_depth for i < depth, row i of b at b_at + i * b_depth, and row r
    of c at c_at + r * c_row. All arrays are float32.
    """
    width, height, vectors, added = (each.literal_value for each in (lanes, rows, columns, adds))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        a_pointer = array_pointer(context, builder, a, arguments[4], arguments[5])
        b_pointer = array_pointer(context, builder, b, arguments[9], arguments[10])
        c_pointer = array_pointer(context, builder, c, arguments[12], arguments[13])
        emit_multiply_tile(
            Vectors(builder, width), height, vectors, bool(added),
            a_pointer, arguments[6], arguments[7], arguments[8], b_pointer, arguments[11], c_pointer, arguments[14],
        )  # fmt: skip
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, rows, columns, adds, a, at, at, at, at, b, at, at, c, at, at), codegen


@intrinsic(prefer_literal=True)
def decode_rows(typingctx, lanes, storage, dim, stored, s_at, count, rows, r_at):
    """Decode `count` stored vectors of `dim` numbers to float32 rows, each padded with zeros to whole SIMD vectors."""
    width, name, size = (each.literal_value for each in (lanes, storage, dim))
    kind = STORAGE_TYPES[name]
    pitch = -(-size // width) * width

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        s_pointer = array_pointer(context, builder, stored, arguments[3], arguments[4])
        r_pointer = array_pointer(context, builder, rows, arguments[6], arguments[7])
        with cgutils.for_range(builder, arguments[5]) as loop:
            source = offset(builder, s_pointer, builder.mul(loop.index, integer(kind.units(size))))
            target = offset(builder, r_pointer, builder.mul(loop.index, integer(pitch)))
            for start in range(0, size, width):
                group = offset(builder, source, kind.units(start))
                part = v.load(group, min(width, size - start), name, start % kind.group)
                v.store(part, offset(builder, target, start))
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, storage, dim, stored, at, at, rows, at), codegen


@intrinsic(prefer_literal=True)
def decode_numbers(typingctx, lanes, storage, stored, s_at, count, target):
    """Decode `count` consecutive stored numbers, whole groups of a grouped type, to float32 from target's start on."""
    width, name = lanes.literal_value, storage.literal_value
    kind = STORAGE_TYPES[name]
    step = max(width, kind.group)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        source = array_pointer(context, builder, stored, arguments[2], arguments[3])
        place = array_pointer(context, builder, target, arguments[5], integer(0))
        whole = builder.sub(arguments[4], builder.urem(arguments[4], integer(step)))
        with cgutils.for_range_slice(builder, integer(0), whole, integer(step)) as (start, _):
            number = builder.mul(builder.udiv(start, integer(step)), integer(kind.units(step)))
            group = offset(builder, source, number)
            for within in range(0, step, width):
                part = v.load(offset(builder, group, kind.units(within)), width, name, within % kind.group)
                v.store(part, offset(builder, offset(builder, place, start), within))
        if kind.group == 1:
            with cgutils.for_range_slice(builder, whole, arguments[4], integer(1)) as (each, _):
                v.store(v.load(offset(builder, source, each), 1, name), offset(builder, place, each), 1)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, storage, stored, at, at, target), codegen
