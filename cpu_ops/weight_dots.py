"""Dot products of a tile of packed weights with quantized activations, emitted as LLVM vector code.

Each group of 32 columns contributes `scale * activation_scale * (sum of code * activation - zero * sum of
activations)`. The sums are int32, by the widest int8 dot product of the CPU. The activations' sums account for zero
points and minimums. For each row of activations, one float32 vector accumulates the results of sixteen rows of weights.

Addresses are int64, so that one compiled caller works with any mixture of formats.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.avx2_dots import group_dots, largest_code, offset_of
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import has, isa
from hetero_kv.cpu_ops.group_codes import code_vectors, group_scales
from hetero_kv.cpu_ops.half_precision_weights import number_dots
from hetero_kv.cpu_ops.weight_codes import (
    DOTS_SIGNATURE,
    call_intrinsic,
    joined,
    load,
    pieces_of,
    prefetch_bytes,
    splat,
)
from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE, VECTORS, WeightFormat

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, TILE), ir.VectorType(_I32, TILE)


def dot_instruction() -> str:
    """Returns the int8 dot product in use: 'vnni512', 'vnni256', 'avx2', 'dotprod' (NEON) or 'generic'."""
    name = isa()
    if name == "avx512" and has("avx512vnni"):
        return "vnni512"
    if name in ("avx512", "avx2"):
        return "vnni256" if has("avxvnni") else "avx2"
    return "dotprod" if has("dotprod") else "generic"


def rows_per_pass() -> int:
    """Returns how many rows of activations share one pass over a tile's codes: as many as fit into registers."""
    return 4 if isa() in ("avx512", "avx2") else 2


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_intrinsic(builder, f"llvm.fma.v{TILE}f32", _FLOATS, a, b, c)


def add_dot(builder: ir.IRBuilder, how: str, sums: ir.Value, codes: ir.Value, four: ir.Value) -> ir.Value:
    """Returns sums + the dot products of each row's four codes and the four activations in the int32 `four`.

    AVX2's sums are of more codes (`avx2_dots.group_dots`).
    """
    if how == "vnni512":
        name = "llvm.x86.avx512.vpdpbusd.512"
        return call_intrinsic(builder, name, _INTS, sums, builder.bitcast(codes, _INTS), splat(builder, four))
    if how == "generic":
        return _add_plain_dot(builder, sums, codes, four)
    count = 4 if how == "dotprod" else 2
    lanes = TILE // count
    narrow, bytes_of = ir.VectorType(_I32, lanes), ir.VectorType(_I8, 4 * lanes)
    x = splat(builder, four, lanes)
    parts = []
    for part_sums, part in zip(pieces_of(builder, sums, count), pieces_of(builder, codes, count), strict=True):
        if how == "vnni256":
            name = "llvm.x86.avx512.vpdpbusd.256"
            parts.append(call_intrinsic(builder, name, narrow, part_sums, builder.bitcast(part, narrow), x))
        else:
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            parts.append(call_intrinsic(builder, name, narrow, part_sums, part, builder.bitcast(x, bytes_of)))
    return joined(builder, parts)


def _add_plain_dot(builder: ir.IRBuilder, sums: ir.Value, codes: ir.Value, four: ir.Value) -> ir.Value:
    lanes = builder.bitcast(codes, _INTS)
    for byte in range(4):
        code = builder.and_(
            builder.lshr(lanes, ir.Constant(_INTS, [8 * byte] * TILE)), ir.Constant(_INTS, [255] * TILE)
        )
        x = builder.ashr(builder.shl(four, ir.Constant(_I32, 24 - 8 * byte)), ir.Constant(_I32, 24))
        sums = builder.add(sums, builder.mul(code, splat(builder, x)))
    return sums


def _zero_of(layout: WeightFormat, how: str) -> tuple[int, int]:
    """Returns what is added to signed codes, for instructions that take unsigned ones, and the code of zero then.

    Raises NotImplementedError for a format that has a minimum and another code of zero than 0.
    """
    offset = 0
    if layout.signed and how != "dotprod":
        offset = offset_of(layout) if how == "avx2" else 128
    zero = offset or layout.zero
    if zero and layout.has_minimum:
        raise NotImplementedError(f"{layout.name} has a minimum and zero is code {zero}; declare one of the two")
    return offset, zero


@intrinsic(prefer_literal=True)
def _terms_of_sums(typingctx, name, how, x_scales, x_sums, columns, taken):
    """Returns the address of what the sums of activations add, on the stack: [taken, columns / 32, parts of a group].

    For formats with a minimum, float32, the activations' sum, by which it is multiplied; for those whose zero is
    another code, int32, to be added to the dot products. The other formats have none. x_scales, x_sums: addresses, as
    for `_tile_dots`.
    """
    layout = FORMATS[name.literal_value]
    _, zero = _zero_of(layout, how.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        x_scales, x_sums, columns, taken = arguments[2:]
        if not (zero or layout.has_minimum):
            return ir.Constant(_I64, 0)
        groups = builder.mul(taken, builder.udiv(columns, ir.Constant(_I64, GROUP)))
        sum_terms = builder.alloca(_I32, builder.mul(groups, ir.Constant(_I64, layout.parts)))
        scales, sums = (
            builder.inttoptr(address, kind.as_pointer()) for address, kind in ((x_scales, _FLOAT), (x_sums, _I32))
        )
        with cgutils.for_range(builder, groups) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, 2))
            halves = [builder.load(builder.gep(sums, [builder.add(first, ir.Constant(_I64, i))])) for i in range(2)]
            for part, total in enumerate(halves if layout.parts == 2 else [builder.add(*halves)]):
                term = builder.mul(total, ir.Constant(_I32, -zero))
                if layout.has_minimum:
                    scale = builder.load(builder.gep(scales, [loop.index]))
                    term = builder.bitcast(builder.fmul(builder.sitofp(total, _FLOAT), scale), _I32)
                place = builder.add(builder.mul(loop.index, ir.Constant(_I64, layout.parts)), ir.Constant(_I64, part))
                builder.store(term, builder.gep(sum_terms, [place]))
        return builder.ptrtoint(sum_terms, _I64)

    return types.int64(name, how, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def _tile_dots(typingctx, name, rows, wide, how, weights, x, x_scales, sum_terms, out, out_stride, columns, taken):
    """Multiply one tile with `taken` rows of activations; write 16 float32 at address out + row * out_stride.

    All arrays are addresses, and strides are in bytes. weights: the tile's first block. x: [taken, columns] int8.
    x_scales: [taken, columns / 32] float32. sum_terms: from `_terms_of_sums`. `wide` rows share one pass over the codes
    while there are as many, then `rows`, a divisor of `taken`.
    """
    layout, instruction = FORMATS[name.literal_value], how.literal_value
    steps = sorted({rows.literal_value, wide.literal_value}, reverse=True)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        weights, x, x_scales, sum_terms, out, out_stride, columns, taken = arguments[4:]
        groups, start = builder.udiv(columns, ir.Constant(_I64, GROUP)), ir.Constant(_I64, 0)
        for step in steps:
            size = ir.Constant(_I64, step)
            end = builder.mul(builder.udiv(taken, size), size)
            with cgutils.for_range_slice(builder, start, end, size) as (row, _):
                before = builder.mul(row, groups)
                sizes = GROUP, 4, 4 * layout.parts
                ahead = [builder.mul(before, ir.Constant(_I64, nbytes)) for nbytes in sizes]
                codes, scales, adds = (builder.add(*each) for each in zip((x, x_scales, sum_terms), ahead, strict=True))
                to = builder.add(out, builder.mul(row, out_stride))
                emit_tile(builder, layout, step, instruction, weights, codes, scales, adds, to, out_stride, columns)
            start = end
        return context.get_dummy_value()

    return types.none(name, rows, wide, how, *[types.int64] * 8), codegen


def emit_tile(
    builder: ir.IRBuilder, layout: WeightFormat, rows: int, how: str, weights: ir.Value, x: ir.Value,
    x_scales: ir.Value, sum_terms: ir.Value, out: ir.Value, out_stride: ir.Value, columns: ir.Value,
) -> None:  # fmt: skip
    """Emit the code of `_tile_dots`: one tile of codes times `rows` rows of activations."""
    int_ = lambda value: ir.Constant(_I64, value)  # noqa: E731
    pointer = _I8.as_pointer()
    offset, zero = _zero_of(layout, how)
    sums = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in range(rows)]
    groups_in_row = builder.udiv(columns, int_(GROUP))
    blocks = builder.udiv(columns, int_(layout.columns))
    first = builder.inttoptr(weights, pointer)

    def at(base: ir.Value, index: ir.Value, scale: int, row: int, stride: int) -> ir.Value:
        """Returns the byte address base + row * groups_in_row * stride + index * scale."""
        place = builder.add(base, builder.mul(index, int_(scale)))
        if row:
            place = builder.add(place, builder.mul(groups_in_row, int_(row * stride)))
        return builder.inttoptr(place, pointer)

    with cgutils.for_range(builder, blocks) as block_loop:
        block = builder.gep(first, [builder.mul(block_loop.index, int_(layout.record_bytes))])
        with cgutils.for_range(builder, int_(layout.groups)) as group_loop:
            place = builder.add(builder.mul(group_loop.index, int_(layout.group_bytes)), int_(layout.head_bytes))
            group = builder.gep(block, [place])
            index = builder.add(builder.mul(block_loop.index, int_(layout.groups)), group_loop.index)
            prefetch_bytes(builder, group, layout.group_bytes, rows)
            values = [at(x, index, GROUP, row, GROUP) for row in range(rows)]
            codes_of = code_vectors(builder, layout, group, how, offset)
            per_part = VECTORS // layout.parts
            for part in range(layout.parts):

                def sum_term(row: int, kind: ir.Type, index: ir.Value = index, part: int = part) -> ir.Value:
                    size = 4 * layout.parts
                    return load(builder, at(sum_terms, index, size, row, size), kind, 4 * part)

                vectors = range(part * per_part, (part + 1) * per_part)
                dots = _vector_dots(builder, layout, how, codes_of, vectors, values, sum_term if zero else None)
                # Loaded behind the dot products, which need all registers.
                scales, minimums = group_scales(builder, layout, block, group)
                for row in range(rows):
                    acc, factor = builder.load(sums[row]), load(builder, at(x_scales, index, 4, row, 4), _FLOAT)
                    scale = builder.fmul(scales[part], splat(builder, factor))
                    acc = _fma(builder, builder.sitofp(dots[row], _FLOATS), scale, acc)
                    if minimums:
                        acc = _fma(builder, minimums[part], splat(builder, sum_term(row, _FLOAT)), acc)
                    builder.store(acc, sums[row])
    for row in range(rows):
        place = builder.inttoptr(builder.add(out, builder.mul(out_stride, int_(row))), pointer)
        builder.store(builder.load(sums[row]), builder.bitcast(place, _FLOATS.as_pointer()), align=4)


def _vector_dots(
    builder: ir.IRBuilder, layout: WeightFormat, how: str, codes_of: Callable[[int], ir.Value], vectors: range,
    activations: Sequence[ir.Value], sum_term: Callable[[int, ir.Type], ir.Value] | None,
) -> list[ir.Value]:  # fmt: skip
    """Returns the dot products of code vectors `vectors` with the rows at addresses `activations`.

    sum_term: emits what is added to a row's; None for nothing.
    """

    def start(row: int) -> ir.Value:
        return splat(builder, sum_term(row, _I32)) if sum_term else ir.Constant(_INTS, None)

    if how == "avx2":
        moves_signs = layout.signed and not offset_of(layout)
        dots = group_dots(builder, largest_code(layout), moves_signs, codes_of, vectors, activations)
        return [builder.add(dot, start(row)) for row, dot in enumerate(dots)] if sum_term else dots
    codes, dots = [codes_of(vector) for vector in vectors], []
    for row, address in enumerate(activations):
        dot = start(row)
        for each, vector in zip(codes, vectors, strict=True):
            dot = add_dot(builder, how, dot, each, load(builder, address, _I32, 4 * vector))
        dots.append(dot)
    return dots


def dots_address(name: str, rows: int) -> int:
    """Returns the address of a compiled function that multiplies tiles of format `name` with rows of activations.

    void (weights, x, x_scales, x_sums, out, out_stride, columns, first_tile, end_tile, taken), all int64: five
    addresses, the bytes between rows of out, the columns of the matrix, the range of tiles, and the number of rows, a
    multiple of `rows`. There are few rows: what their sums add lies on the stack. x is [taken, columns] int8, x_scales
    [taken, columns / 32] float32, x_sums [taken, columns / 16] int32. Tile t is written to columns 16t to 16t + 15 of
    out. For formats of 16-bit numbers, x is [taken, columns] float32, and x_scales and x_sums are not read.
    """
    if number := FORMATS[name].number:
        is_wide = isa() == "avx512"
        return number_dots(number, rows, 4 if is_wide else 2, rows if is_wide else min(rows, 2)).address
    # AVX-512's registers have room for the sums of eight rows: a tile's codes are unpacked half as often.
    wide = 2 * rows if isa() == "avx512" and rows > 1 else rows
    return _dots(name, rows, wide, dot_instruction()).address


@cache
def _dots(name: str, rows: int, wide: int, how: str) -> Any:
    layout = FORMATS[name]
    record, block_columns = layout.record_bytes, layout.columns
    code_version = CODE_VERSION

    @cfunc(DOTS_SIGNATURE, cache=True, nopython=True)
    def dots(weights, x, x_scales, x_sums, out, out_stride, columns, first_tile, end_tile, taken):
        tile_bytes = columns // block_columns * record + 0 * code_version
        sum_terms = _terms_of_sums(name, how, x_scales, x_sums, columns, taken)
        for tile in range(first_tile, end_tile):
            place = weights + tile * tile_bytes
            _tile_dots(
                name, rows, wide, how, place, x, x_scales, sum_terms, out + tile * 64, out_stride, columns, taken
            )

    return dots
