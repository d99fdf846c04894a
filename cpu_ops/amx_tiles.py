"""bfloat16 matrix products with AMX tiles of 16 rows of 16 words; a word is two neighbouring numbers."""

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.cpu_features import has, isa
from hetero_kv.cpu_ops.vectors import array_pointer, byte_pointer, integer, offset

TILE = 16
"""Rows of a tile, and words of a row."""
BLOCK = 2 * TILE
"""Rows and columns of one product: four tiles of sums, two tiles of each factor."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
# On Linux a process must request permission to use tiles: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


def multiplies_by_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 tiles and the system permits this process to use them."""
    return isa() == "avx512" and has("avx512bf16") and has("amx-tile") and has("amx-bf16") and _is_allowed()


@cache
def _is_allowed() -> bool:
    """Request the permission to use tiles, for all threads of this process."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0


def _call(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(_BYTE, tile)


@intrinsic
def begin_tiles(typingctx, before):
    """Configure a thread's eight tiles at full size; save the former configuration in `before`, [64] uint8."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        # LDTILECFG's format: palette 1, bytes per row of each tile from byte 16 on, rows of each tile from byte 48 on.
        shapes = bytearray(64)
        shapes[0], shapes[16:32], shapes[48:56] = 1, bytes([4 * TILE, 0]) * 8, bytes([TILE]) * 8
        config = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(_BYTE, 64), shapes))
        _call(builder, "sttilecfg", array_pointer(context, builder, before, arguments[0], integer(0)))
        _call(builder, "ldtilecfg", byte_pointer(builder, config))
        return context.get_dummy_value()

    return types.none(before), codegen


@intrinsic
def end_tiles(typingctx, before):
    """Restore the tile configuration that `begin_tiles` saved, because other libraries rely on theirs."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _call(builder, "ldtilecfg", array_pointer(context, builder, before, arguments[0], integer(0)))
        return context.get_dummy_value()

    return types.none(before), codegen


def emit_multiply_by_tiles(
    builder: ir.IRBuilder, adds: bool, a: ir.Value, a_row: ir.Value, depth: ir.Value, b: ir.Value, b_row: ir.Value,
    c: ir.Value, c_row: ir.Value,
) -> None:  # fmt: skip
    """Emit the code of `multiply_by_tiles`, on pointers; row strides count words of a and b and numbers of c."""
    a_pitch = builder.mul(a_row, integer(4))
    count = builder.udiv(depth, integer(TILE))

    def left(index: ir.Value) -> ir.Value:
        return byte_pointer(builder, offset(builder, a, builder.mul(index, integer(TILE))))

    _emit_product(builder, adds, count, left, a_pitch, b, b_row, c, c_row)


def _emit_product(
    builder: ir.IRBuilder, adds: bool, count: ir.Value, left_of: Callable[[ir.Value], ir.Value], a_pitch: ir.Value,
    b: ir.Value, b_row: ir.Value, c: ir.Value, c_row: ir.Value,
) -> None:  # fmt: skip
    """Emit the code of a product that is `count` tiles deep.

    left_of: returns the address of a's `BLOCK` rows for a tile index along the depth. a_pitch: a's row stride in bytes.
    """

    def part(pointer: ir.Value, row: ir.Value, rows: int, columns: int) -> ir.Value:
        at = builder.add(builder.mul(row, integer(rows)), integer(columns))
        return byte_pointer(builder, offset(builder, pointer, at))

    b_pitch, c_pitch = (builder.mul(row, integer(4)) for row in (b_row, c_row))
    cells = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for tile, (i, j) in enumerate(cells):
        if adds:
            _call(builder, "tileloadd64", _number(tile), part(c, c_row, i * TILE, j * TILE), c_pitch)
        else:
            _call(builder, "tilezero", _number(tile))
    with cgutils.for_range(builder, count) as loop:
        left = left_of(loop.index)
        right = offset(builder, b, builder.mul(builder.mul(loop.index, integer(TILE)), b_row))
        for each in range(2):
            rows = offset(builder, left, builder.mul(a_pitch, integer(each * TILE)))
            _call(builder, "tileloadd64", _number(4 + each), rows, a_pitch)
            _call(builder, "tileloadd64", _number(6 + each), part(right, b_row, 0, each * TILE), b_pitch)
        for tile, (i, j) in enumerate(cells):
            _call(builder, "tdpbf16ps", _number(tile), _number(4 + i), _number(6 + j))
    for tile, (i, j) in enumerate(cells):
        _call(builder, "tilestored64", _number(tile), part(c, c_row, i * TILE, j * TILE), c_pitch)


@intrinsic(prefer_literal=True)
def multiply_from(typingctx, adds, addresses, first, count, skipped, a_pitch, b, b_at, b_row, c, c_at, c_row):
    """As `multiply_by_tiles`, where each `TILE` words of a's depth have their own address.

    addresses: int64; those at first .. first + count - 1 are used, each advanced by `skipped` bytes. a_pitch: a's row
    stride in bytes.
    """
    is_sum = bool(adds.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        address_pointer = array_pointer(context, builder, addresses, arguments[1], arguments[2])
        second = array_pointer(context, builder, b, arguments[6], arguments[7])
        sums = array_pointer(context, builder, c, arguments[9], arguments[10])

        def left(index: ir.Value) -> ir.Value:
            address = builder.add(builder.load(offset(builder, address_pointer, index)), arguments[4])
            return builder.inttoptr(address, _BYTE.as_pointer())

        _emit_product(builder, is_sum, arguments[3], left, arguments[5], second, arguments[8], sums, arguments[11])
        return context.get_dummy_value()

    at = types.int64
    return types.none(adds, addresses, at, at, at, at, b, at, at, c, at, at), codegen


@intrinsic(prefer_literal=True)
def multiply_laid_out(typingctx, adds, a, a_at, count, b, b_at, c, c_at):
    """As `multiply_by_tiles`, of factors laid out for it: `count` blocks, each [`BLOCK` rows, `TILE`] words of a.

    b: words, [count * TILE, BLOCK] from b_at on. c: float32, [BLOCK, BLOCK] from c_at on.
    """
    is_sum = bool(adds.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        first = array_pointer(context, builder, a, arguments[1], arguments[2])
        second = array_pointer(context, builder, b, arguments[4], arguments[5])
        sums = array_pointer(context, builder, c, arguments[6], arguments[7])

        def left(index: ir.Value) -> ir.Value:
            return byte_pointer(builder, offset(builder, first, builder.mul(index, integer(BLOCK * TILE))))

        pitch, side = integer(4 * TILE), integer(BLOCK)
        _emit_product(builder, is_sum, arguments[3], left, pitch, second, side, sums, side)
        return context.get_dummy_value()

    at = types.int64
    return types.none(adds, a, at, at, b, at, c, at), codegen


@intrinsic(prefer_literal=True)
def multiply_by_tiles(typingctx, adds, a, a_at, a_row, depth, b, b_at, b_row, c, c_at, c_row):
    """Compute c = a b, or c += a b if the literal `adds` is 1, for `BLOCK` rows of a and `BLOCK` columns of b.

    a: words; word i of row r is at a_at + r * a_row + i, i < depth, depth a multiple of 16. b: words; row i is at
    b_at + i * b_row, each word being the numbers 2 i and 2 i + 1 of a column. c: float32, row r at c_at + r * c_row.
    """
    is_sum = bool(adds.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        first = array_pointer(context, builder, a, arguments[1], arguments[2])
        second = array_pointer(context, builder, b, arguments[5], arguments[6])
        sums = array_pointer(context, builder, c, arguments[8], arguments[9])
        emit_multiply_by_tiles(
            builder, is_sum, first, arguments[3], arguments[4], second, arguments[7], sums, arguments[10]
        )
        return context.get_dummy_value()

    at = types.int64
    return types.none(adds, a, at, at, at, b, at, at, c, at, at), codegen


@intrinsic
def transpose_words(typingctx, source, s_at, s_row, target, t_at, t_row):
    """Transpose `TILE` x `TILE` words: target[t_at + j * t_row + i] = source[s_at + i * s_row + j]."""
    words = ir.VectorType(_WORD, TILE)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        source_pointer = array_pointer(context, builder, source, arguments[0], arguments[1])
        place = array_pointer(context, builder, target, arguments[3], arguments[4])

        def line(pointer: ir.Value, row: ir.Value, number: int) -> ir.Value:
            at = builder.mul(row, integer(number))
            return builder.bitcast(offset(builder, pointer, at), words.as_pointer())

        rows = [builder.load(line(source_pointer, arguments[2], each), align=4, typ=words) for each in range(TILE)]
        # At each level, words are exchanged with the row whose number differs in one bit.
        for bit in (8, 4, 2, 1):
            transposed = list(rows)
            for low in (each for each in range(TILE) if not each & bit):
                high = low | bit
                masks = (
                    [(lane if not lane & bit else TILE + (lane ^ bit)) for lane in range(TILE)],
                    [(lane ^ bit if not lane & bit else TILE + lane) for lane in range(TILE)],
                )
                for number, mask in zip((low, high), masks, strict=True):
                    chosen = ir.Constant(ir.VectorType(_WORD, TILE), mask)
                    transposed[number] = builder.shuffle_vector(rows[low], rows[high], chosen)
            rows = transposed
        for each, row in enumerate(rows):
            builder.store(row, line(place, arguments[5], each), align=4)
        return context.get_dummy_value()

    at = types.int64
    return types.none(source, at, at, target, at, at), codegen
