"""Emits LLVM vector code that reads codes of a packed tile: their planes, and tables of sixteen numbers."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from hetero_kv.cpu_ops.vectors import prefetch_line
from hetero_kv.cpu_ops.weight_formats import TILE, VECTORS, WeightFormat

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), TILE), ir.VectorType(_I32, TILE)
_CODES = ir.VectorType(_I8, 4 * TILE)
DOTS_SIGNATURE = types.void(*[types.int64] * 10)
"""The signature of kernels that multiply tiles of codes or numbers; see `cpu_ops.weight_dots.dots_address`."""
#: Bytes ahead at which weights are prefetched. A core's instruction window does not reach that far by itself: with 4 KB
#: a matrix in Q5_0 is read 1.7 times as fast as without prefetching, one in Q8_0 1.25 times.
_AHEAD = 4096
#: By the dot product in use: the intrinsic that looks up a table of sixteen bytes, and its lanes.
_LOOKUPS = {
    "vnni512": ("llvm.x86.avx512.pshuf.b.512", 64),
    "vnni256": ("llvm.x86.avx2.pshuf.b", 32),
    "avx2": ("llvm.x86.avx2.pshuf.b", 32),
    "dotprod": ("llvm.aarch64.neon.tbl1.v16i8", 16),
}


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = TILE) -> ir.Value:
    """Returns a vector with `scalar` in every lane."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def load(builder: ir.IRBuilder, pointer: ir.Value, kind: ir.Type, at: int = 0) -> ir.Value:
    """Load `kind` from `pointer` (to bytes) + `at` bytes, of any alignment."""
    place = builder.gep(pointer, [ir.Constant(_I64, at)])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1, typ=kind)


def prefetch_bytes(builder: ir.IRBuilder, pointer: ir.Value, nbytes: int, rows: int) -> None:
    """Prefetch the `nbytes` bytes that are `_AHEAD` bytes after `pointer` (to bytes); the address may be invalid.

    rows: of activations in a pass. The weights of one row are read once per token. In the last cache they would take
    the place of what the program between kernels needs.
    """
    for line in range(0, nbytes, 64):
        place = builder.gep(pointer, [ir.Constant(_I64, _AHEAD + line)])
        prefetch_line(builder, place, is_read_once=rows == 1)


def call_intrinsic(builder: ir.IRBuilder, name: str, kind: ir.Type, *operands: ir.Value) -> ir.Value:
    """Call the LLVM intrinsic `name`, which returns `kind`."""
    signature = ir.FunctionType(kind, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), operands)


def pieces_of(builder: ir.IRBuilder, vector: ir.Value, pieces: int) -> list[ir.Value]:
    """Split a vector into `pieces` vectors of equal size."""
    lanes = vector.type.count // pieces
    undefined = ir.Constant(vector.type, ir.Undefined)
    masks = [ir.Constant(ir.VectorType(_I32, lanes), list(range(i * lanes, (i + 1) * lanes))) for i in range(pieces)]
    return [builder.shuffle_vector(vector, undefined, mask) for mask in masks]


def joined(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Concatenate vectors, a power of two of them."""
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        mask = ir.Constant(ir.VectorType(_I32, lanes), list(range(lanes)))
        parts = [builder.shuffle_vector(a, b, mask) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _shifted(builder: ir.IRBuilder, plane: ir.Value, right: int, mask: int) -> ir.Value:
    """Returns (plane >> right) & mask for every byte; a negative `right` shifts to the left."""
    wide = ir.VectorType(_I16, 2 * TILE)
    if right:
        amount = ir.Constant(wide, [abs(right)] * wide.count)
        moved = builder.bitcast(plane, wide)
        plane = builder.bitcast(builder.lshr(moved, amount) if right > 0 else builder.shl(moved, amount), _CODES)
    return builder.and_(plane, ir.Constant(_CODES, [mask] * _CODES.count))


def unpacked_vector(
    builder: ir.IRBuilder, layout: WeightFormat, group: ir.Value, vector: int, how: str, offset: int = 0
) -> ir.Value:
    """Returns vector `vector` of eight of the codes of the group at `group`, or of the format's table at these codes.

    how: the dot product in use (`cpu_ops.weight_dots.dot_instruction`). offset: added to signed codes, 0 or 128.
    """
    at = layout.scale_bytes
    step = VECTORS * layout.low_bits // 8
    codes = load(builder, group, _CODES, at + 64 * (vector % step))
    if layout.low_bits < 8:
        codes = _shifted(builder, codes, layout.low_bits * (vector // step), 2**layout.low_bits - 1)
    if layout.high_bits:
        step = layout.high_bits
        high = load(builder, group, _CODES, at + layout.low_bytes + 64 * (vector % step))
        mask = (2**layout.high_bits - 1) << layout.low_bits
        codes = builder.or_(codes, _shifted(builder, high, layout.high_bits * (vector // step) - layout.low_bits, mask))
    if layout.table:
        return looked_up(builder, codes, [value + offset & 255 for value in layout.table], how)
    if offset and layout.signed:
        codes = builder.xor(codes, ir.Constant(_CODES, [offset] * _CODES.count))
    return codes


def looked_up(builder: ir.IRBuilder, codes: ir.Value, table: list[int], how: str) -> ir.Value:
    """Returns table[code] for every byte of `codes`, all below 16."""
    if how in _LOOKUPS:
        name, lanes = _LOOKUPS[how]
        kind = ir.VectorType(_I8, lanes)
        values = ir.Constant(kind, table * (lanes // len(table)))
        parts = pieces_of(builder, codes, _CODES.count // lanes)
        return joined(builder, [call_intrinsic(builder, name, kind, values, part) for part in parts])
    # Select by one bit of the code after the other, which halves the table each time.
    left = [ir.Constant(_CODES, [value] * _CODES.count) for value in table]
    for bit in range(4):
        mask = ir.Constant(_CODES, [1 << bit] * _CODES.count)
        is_set = builder.icmp_unsigned("!=", builder.and_(codes, mask), ir.Constant(_CODES, None))
        left = [builder.select(is_set, odd, even) for even, odd in zip(left[::2], left[1::2], strict=True)]
    return left[0]
