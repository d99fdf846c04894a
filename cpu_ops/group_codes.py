"""Emits LLVM vector code that reads codes, scales and minimums of a group of columns, for every format of codes."""

from collections.abc import Callable

from llvmlite import ir

from hetero_kv.cpu_ops.codebook_codes import CodebookGroup
from hetero_kv.cpu_ops.weight_codes import load, unpacked_vector
from hetero_kv.cpu_ops.weight_formats import TILE, WeightFormat

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), TILE), ir.VectorType(_I32, TILE)


def code_vectors(
    builder: ir.IRBuilder, layout: WeightFormat, group: ir.Value, how: str, offset: int = 0
) -> Callable[[int], ir.Value]:
    """Returns what emits a vector of eight of the codes of the group at `group`, or of the table at these codes.

    All vectors are emitted in one basic block. how: the dot product in use (`cpu_ops.weight_dots.dot_instruction`).
    offset: added to signed codes, 0 or 128.
    """
    if layout.codebook:
        return CodebookGroup(builder, layout, group, how, offset).vector
    return lambda vector: unpacked_vector(builder, layout, group, vector, how, offset)


def _halves(builder: ir.IRBuilder, pointer: ir.Value, at: int) -> ir.Value:
    return builder.fpext(load(builder, pointer, ir.VectorType(ir.HalfType(), TILE), at), _FLOATS)


def _powers(builder: ir.IRBuilder, pointer: ir.Value, at: int) -> ir.Value:
    """Returns 2^(e - 128) for sixteen bytes e; 2^-128 and 2^-127 are subnormal."""
    exponents = builder.zext(load(builder, pointer, ir.VectorType(_I8, TILE), at), _INTS)

    def every(value: int) -> ir.Constant:
        return ir.Constant(_INTS, [value] * TILE)

    normal = builder.shl(builder.sub(exponents, every(1)), every(23))
    small = builder.shl(every(1 << 21), builder.and_(exponents, every(1)))
    bits = builder.select(builder.icmp_unsigned("<", exponents, every(2)), small, normal)
    return builder.bitcast(bits, _FLOATS)


def _small_floats(builder: ir.IRBuilder, pointer: ir.Value, at: int) -> ir.Value:
    """Returns halves of sixteen E4M3 floats without sign; the one that would be NaN is 0."""
    codes = load(builder, pointer, ir.VectorType(_I8, TILE), at)
    nan, zero = ir.Constant(codes.type, [0x7F] * TILE), ir.Constant(codes.type, None)
    codes = builder.select(builder.icmp_unsigned("==", codes, nan), zero, codes)
    shorts = ir.VectorType(ir.IntType(16), TILE)
    bits = builder.shl(builder.zext(builder.and_(codes, nan), shorts), ir.Constant(shorts, [7] * TILE))
    # As a float16 of these bits, the exponent is less by eight, of which one is the half.
    small = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), TILE)), _FLOATS)
    return builder.fmul(small, ir.Constant(_FLOATS, [128.0] * TILE))


def _small_ints(builder: ir.IRBuilder, pointer: ir.Value, at: int, signed: bool) -> ir.Value:
    ints = load(builder, pointer, ir.VectorType(_I8, TILE), at)
    return builder.sitofp(builder.sext(ints, _INTS) if signed else builder.zext(ints, _INTS), _FLOATS)


def group_scales(
    builder: ir.IRBuilder, layout: WeightFormat, block: ir.Value, group: ir.Value
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Returns scales and minimums of a group's parts, as vectors of sixteen rows.

    Minimums are added to weights; their list is empty if the format has none.
    """
    if layout.bytes_as:
        of_bytes = {"e8m0": _powers, "e4m3": _small_floats}[layout.bytes_as]
        return [of_bytes(builder, group, part * TILE) for part in range(layout.scales)], []
    if not layout.two_levels:
        return [_halves(builder, group, 0)], [_halves(builder, group, 2 * TILE)] * layout.has_minimum
    first = _halves(builder, block, 0)
    if layout.unit != 1:
        first = builder.fmul(first, ir.Constant(_FLOATS, [layout.unit] * TILE))
    if layout.codebook:
        return CodebookGroup(builder, layout, group, "").scales(first), []
    if not layout.scales:
        return [first], []
    scales = [
        builder.fmul(first, _small_ints(builder, group, part * TILE, layout.signed_scales))
        for part in range(layout.scales)
    ]
    if not layout.has_minimum:
        return scales, []
    first = builder.fneg(_halves(builder, block, 2 * TILE))
    places = [(layout.scales + part) * TILE for part in range(layout.scales)]
    return scales, [builder.fmul(first, _small_ints(builder, group, at, False)) for at in places]
