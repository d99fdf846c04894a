"""Products of matrices of bfloat16 by AMX's tiles: 16 rows of 16 words, a word being two neighbouring numbers."""

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cpu_ops.cpu_features import has, isa
from cpu_ops.vectors import array_pointer, byte_pointer, integer, offset

TILE = 16
"""Rows of a tile, and words of a row."""
BLOCK = 2 * TILE
"""Rows and columns of a product that is made at once: four tiles of sums, two of each factor."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
# Linux lends a process its tiles when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


def multiplies_by_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 by tiles, and the system lets this process."""
    return isa() == "avx512" and has("avx512bf16") and has("amx-tile") and has("amx-bf16") and _is_allowed()


@cache
def _is_allowed() -> bool:
    """Ask the system for the tiles, for all threads of this process."""
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
    """Take a thread's tiles, all eight whole; in which shapes they were is written to `before`, [64] uint8."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        # As LDTILECFG reads it: palette 1, bytes of each tile's rows from byte 16 on, how many rows from 48 on.
        shapes = bytearray(64)
        shapes[0], shapes[16:32], shapes[48:56] = 1, bytes([4 * TILE, 0]) * 8, bytes([TILE]) * 8
        given = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(_BYTE, 64), shapes))
        _call(builder, "sttilecfg", array_pointer(context, builder, before, arguments[0], integer(0)))
        _call(builder, "ldtilecfg", byte_pointer(builder, given))
        return context.get_dummy_value()

    return types.none(before), codegen


@intrinsic
def end_tiles(typingctx, before):
    """Give a thread's tiles back in the shapes that `begin_tiles` found: libraries go on with theirs."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _call(builder, "ldtilecfg", array_pointer(context, builder, before, arguments[0], integer(0)))
        return context.get_dummy_value()

    return types.none(before), codegen


def emit_multiply_by_tiles(
    builder: ir.IRBuilder, adds: bool, a: ir.Value, a_row: ir.Value, depth: ir.Value, b: ir.Value, b_row: ir.Value,
    c: ir.Value, c_row: ir.Value,
) -> None:  # fmt: skip
    """The code of `multiply_by_tiles`, on pointers to words and numbers; rows are as far apart as so many of them."""
    a_pitch = builder.mul(a_row, integer(4))
    count = builder.udiv(depth, integer(TILE))

    def left(index: ir.Value) -> ir.Value:
        return byte_pointer(builder, offset(builder, a, builder.mul(index, integer(TILE))))

    _emit_product(builder, adds, count, left, a_pitch, b, b_row, c, c_row)


def _emit_product(
    builder: ir.IRBuilder, adds: bool, count: ir.Value, left_of: Callable[[ir.Value], ir.Value], a_pitch: ir.Value,
    b: ir.Value, b_row: ir.Value, c: ir.Value, c_row: ir.Value,
) -> None:  # fmt: skip
    """The code of a product that is `count` tiles deep; left_of: where a's `BLOCK` rows of a tile's depth begin.

    a_pitch: from row to row, in bytes.
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
    """As `multiply_by_tiles`, of words of a that lie anywhere: of each `TILE` of its depth at an address of their own.

    addresses: int64; those from `first` on, `count` of them, and each `skipped` bytes further on. a_pitch: from row to
    row, in bytes.
    """
    is_sum = bool(adds.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        given = array_pointer(context, builder, addresses, arguments[1], arguments[2])
        second = array_pointer(context, builder, b, arguments[6], arguments[7])
        sums = array_pointer(context, builder, c, arguments[9], arguments[10])

        def left(index: ir.Value) -> ir.Value:
            address = builder.add(builder.load(offset(builder, given, index)), arguments[4])
            return builder.inttoptr(address, _BYTE.as_pointer())

        _emit_product(builder, is_sum, arguments[3], left, arguments[5], second, arguments[8], sums, arguments[11])
        return context.get_dummy_value()

    at = types.int64
    return types.none(adds, addresses, at, at, at, at, b, at, at, c, at, at), codegen


@intrinsic(prefer_literal=True)
def multiply_by_tiles(typingctx, adds, a, a_at, a_row, depth, b, b_at, b_row, c, c_at, c_row):
    """c = a b, or c += a b where the literal `adds` is 1, of `BLOCK` rows of a and `BLOCK` columns of b.

    a: words, word i of row r at a_at + r * a_row + i, i < depth, a multiple of 16. b: words, row i at b_at + i * b_row,
    a column's numbers 2 i and 2 i + 1 in each. c: float32, row r at c_at + r * c_row.
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
def turn_words(typingctx, source, s_at, s_row, target, t_at, t_row):
    """Transpose `TILE` x `TILE` words: target[t_at + j * t_row + i] = source[s_at + i * s_row + j]."""
    words = ir.VectorType(_WORD, TILE)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        given = array_pointer(context, builder, source, arguments[0], arguments[1])
        place = array_pointer(context, builder, target, arguments[3], arguments[4])

        def line(pointer: ir.Value, row: ir.Value, number: int) -> ir.Value:
            at = builder.mul(row, integer(number))
            return builder.bitcast(offset(builder, pointer, at), words.as_pointer())

        rows = [builder.load(line(given, arguments[2], each), align=4, typ=words) for each in range(TILE)]
        # Level by level words change places with those of the row whose number differs by one bit.
        for bit in (8, 4, 2, 1):
            turned = list(rows)
            for low in (each for each in range(TILE) if not each & bit):
                high = low | bit
                masks = (
                    [(lane if not lane & bit else TILE + (lane ^ bit)) for lane in range(TILE)],
                    [(lane ^ bit if not lane & bit else TILE + lane) for lane in range(TILE)],
                )
                for number, mask in zip((low, high), masks, strict=True):
                    chosen = ir.Constant(ir.VectorType(_WORD, TILE), mask)
                    turned[number] = builder.shuffle_vector(rows[low], rows[high], chosen)
            rows = turned
        for each, row in enumerate(rows):
            builder.store(row, line(place, arguments[5], each), align=4)
        return context.get_dummy_value()

    at = types.int64
    return types.none(source, at, at, target, at, at), codegen
