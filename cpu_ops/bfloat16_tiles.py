"""bfloat16 matrix products with AVX-512's pairwise dot products, which accumulate in float32, and their softmax.

A word is two bfloat16 numbers that are neighbours along the summed dimension. One instruction adds the products of 16
pairs of words to 16 float32 numbers.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, integer, offset

LANES = 16
COLUMNS = 4 * LANES
"""Columns of a register tile."""
_WORDS = ir.VectorType(ir.IntType(32), LANES)


class BFloat16(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


_PAIRS, _HALVES = ir.VectorType(BFloat16(), 2 * LANES), ir.VectorType(BFloat16(), LANES)


def _add_pairs(v: Vectors, slot: ir.Value, first: ir.Value, second: ir.Value) -> None:
    """Add the products of two vectors of words, summed within each word, to the float32 vector in a slot."""
    kind = ir.FunctionType(v.type, [v.type, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(v.builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    pairs = [v.builder.bitcast(each, _PAIRS) for each in (first, second)]
    v.builder.store(v.builder.call(function, [v.builder.load(slot), *pairs]), slot)


def _words(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    return builder.load(builder.bitcast(pointer, _WORDS.as_pointer()), align=4, typ=_WORDS)


def _same(word: int) -> ir.Constant:
    return ir.Constant(_WORDS, [word] * LANES)


def _multiply(
    v: Vectors, rows: int, row_words: int, left: ir.Value, right: ir.Value, right_pitch: int, depth: ir.Value,
    slots: list[ir.Value], left_step: int = 1,
) -> None:  # fmt: skip
    """Add left's words times right's rows to the tile in `slots`, which has `rows` rows of equally many vectors.

    Word i of left's row r is at r * row_words + i * left_step.
    """
    vectors = len(slots) // rows
    with cgutils.for_range(v.builder, depth) as loop:
        line = offset(v.builder, right, v.builder.mul(loop.index, integer(right_pitch)))
        columns = [_words(v.builder, offset(v.builder, line, LANES * each)) for each in range(vectors)]
        for row in range(rows):
            start = offset(v.builder, left, v.builder.mul(loop.index, integer(left_step)))
            place = v.builder.bitcast(offset(v.builder, start, row * row_words), ir.IntType(32).as_pointer())
            word = v.everywhere(v.builder.load(place, align=4, typ=ir.IntType(32)))
            for column, slot in zip(columns, slots[row * vectors : (row + 1) * vectors], strict=True):
                _add_pairs(v, slot, word, column)


def emit_score_tile_bf16(
    builder: ir.IRBuilder, rows: int, depth: int, pitch: int, left: ir.Value, right: ir.Value, scores: ir.Value
) -> None:
    """Emit the code of `score_tile_bf16`, on pointers, for one tile of `COLUMNS`."""
    v = Vectors(builder, LANES)
    slots = v.slots([v.zero] * (rows * COLUMNS // LANES))
    for slot in slots:
        builder.store(v.zero, slot)
    _multiply(v, rows, depth, left, right, pitch, integer(depth), slots)
    for index, slot in enumerate(slots):
        row, part = divmod(index, COLUMNS // LANES)
        v.store(builder.load(slot), offset(builder, scores, row * pitch + part * LANES))


@intrinsic(prefer_literal=True)
def score_tile_bf16(typingctx, rows, depth, pitch, q, q_at, keys, count, scores):
    """Compute scores of a query tile: scores[r * pitch + j] for j < count, rounded up to whole tiles of `COLUMNS`.

    q: words, [rows, depth] from `q_at` on. keys: words, [depth, pitch], one key per column.
    """
    height, words, stride = (each.literal_value for each in (rows, depth, pitch))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        q_pointer = array_pointer(context, builder, q, arguments[3], arguments[4])
        k_pointer = array_pointer(context, builder, keys, arguments[5], integer(0))
        s_pointer = array_pointer(context, builder, scores, arguments[7], integer(0))
        with cgutils.for_range_slice(builder, integer(0), arguments[6], integer(COLUMNS)) as (column, _):
            key, place = offset(builder, k_pointer, column), offset(builder, s_pointer, column)
            emit_score_tile_bf16(builder, height, words, stride, q_pointer, key, place)
        return context.get_dummy_value()

    at = types.int64
    return types.none(rows, depth, pitch, q, at, keys, at, scores), codegen


def _add_values(
    v: Vectors, rows: int, dim: int, weights: ir.Value, row_words: int, step: int, pairs: ir.Value, values: ir.Value,
    sums: ir.Value,
) -> None:  # fmt: skip
    """Add weights times values [pairs, dim] to sums [rows, dim]; weights are words, laid out as `_multiply`'s left."""
    builder = v.builder
    for start in range(0, dim, COLUMNS):
        width = min(COLUMNS, dim - start) // LANES
        cells = [(row, start + part * LANES) for row in range(rows) for part in range(width)]
        places = [offset(builder, sums, row * dim + column) for row, column in cells]
        slots = v.slots([v.load(place) for place in places])
        _multiply(v, rows, row_words, weights, offset(builder, values, start), dim, pairs, slots, step)
        for place, slot in zip(places, slots, strict=True):
            v.store(builder.load(slot), place)


@intrinsic(prefer_literal=True)
def add_values_bf16(typingctx, rows, dim, pitch, weights, pairs, values, sums, sums_at):
    """Add the weighted values of `pairs` pairs of tokens to sums[sums_at + r * dim + d], d < dim.

    weights: numbers, [rows, 2 * pitch]. values: words, [pairs, dim], each a pair of tokens' numbers of one channel.
    dim: a multiple of 16.
    """
    height, size, stride = (each.literal_value for each in (rows, dim, pitch))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        halves = array_pointer(context, builder, weights, arguments[3], integer(0))
        w_pointer = builder.bitcast(halves, ir.IntType(32).as_pointer())
        v_pointer = array_pointer(context, builder, values, arguments[5], integer(0))
        s_pointer = array_pointer(context, builder, sums, arguments[6], arguments[7])
        _add_values(Vectors(builder, LANES), height, size, w_pointer, stride, 1, arguments[4], v_pointer, s_pointer)
        return context.get_dummy_value()

    at = types.int64
    return types.none(rows, dim, pitch, weights, at, values, sums, at), codegen


@intrinsic(prefer_literal=True)
def add_values_of_lanes_bf16(typingctx, rows, dim, pitch, weights, weights_at, pairs, values, sums, sums_at):
    """As `add_values_bf16`, with weights as words, each a pair of tokens' weights for one query: word (pair, r) is at
    weights_at + pair * pitch + r."""
    height, size, stride = (each.literal_value for each in (rows, dim, pitch))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        w_pointer = array_pointer(context, builder, weights, arguments[3], arguments[4])
        v_pointer = array_pointer(context, builder, values, arguments[6], integer(0))
        s_pointer = array_pointer(context, builder, sums, arguments[7], arguments[8])
        _add_values(Vectors(builder, LANES), height, size, w_pointer, 1, stride, arguments[5], v_pointer, s_pointer)
        return context.get_dummy_value()

    at = types.int64
    return types.none(rows, dim, pitch, weights, at, at, values, sums, at), codegen


@intrinsic(prefer_literal=True)
def lane_weights_bf16(typingctx, pitch, scores, s_at, pairs, factor, most, m_at, weights, totals):
    """Write 2 ** ((score - most) * factor) as bfloat16, two tokens per word, and add the weights to totals.

    scores: [2 * pairs, pitch]; the 16 lanes from `s_at` on hold one query each. most, totals: from `m_at` on. weights:
    words, [pairs, pitch], from `s_at` on.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _emit_lane_weights(context, builder, signature.args, arguments, pitch.literal_value, None)
        return context.get_dummy_value()

    real, at = types.float32, types.int64
    return types.none(pitch, scores, at, at, real, most, at, weights, totals), codegen


@intrinsic(prefer_literal=True)
def split_lane_weights_bf16(typingctx, pitch, scores, s_at, pairs, factor, most, m_at, weights, totals, rests):
    """As `lane_weights_bf16`; what a weight loses by rounding is written to `rests`, as bfloat16 in weights' form.

    Products with both are those of weights with 16 bits of precision.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rest = array_pointer(context, builder, signature.args[9], arguments[9], arguments[2])
        _emit_lane_weights(context, builder, signature.args, arguments, pitch.literal_value, rest)
        return context.get_dummy_value()

    real, at = types.float32, types.int64
    return types.none(pitch, scores, at, at, real, most, at, weights, totals, rests), codegen


def _emit_lane_weights(
    context: Any, builder: ir.IRBuilder, kinds: Any, arguments: Any, stride: int, rests: ir.Value | None
) -> None:
    v = Vectors(builder, LANES)
    s_pointer = array_pointer(context, builder, kinds[1], arguments[1], arguments[2])
    w_pointer = array_pointer(context, builder, kinds[7], arguments[7], arguments[2])
    t_pointer = array_pointer(context, builder, kinds[8], arguments[8], arguments[6])
    times = v.everywhere(arguments[4])
    most_of = v.load(array_pointer(context, builder, kinds[5], arguments[5], arguments[6]))
    shift = builder.fneg(builder.fmul(most_of, times))
    (slot,) = v.slots([v.load(t_pointer)])

    def rounded(numbers: ir.Value) -> ir.Value:
        # Adding half of the last bit that is kept rounds to nearest, ties away from zero.
        return builder.add(builder.bitcast(numbers, _WORDS), _same(1 << 15))

    def write(pair: list[ir.Value], target: ir.Value, number: ir.Value) -> None:
        lower, upper = builder.lshr(pair[0], _same(16)), builder.and_(pair[1], _same(0xFFFF << 16))
        place = offset(builder, target, builder.mul(number, integer(stride)))
        builder.store(builder.or_(lower, upper), builder.bitcast(place, _WORDS.as_pointer()), align=4)

    with cgutils.for_range(builder, arguments[3]) as loop:
        line = builder.mul(loop.index, integer(2 * stride))
        pair, lost = [], []
        for token in range(2):
            score = v.load(offset(builder, offset(builder, s_pointer, line), token * stride))
            weight = v.exp2(v.call("fmuladd", score, times, shift), coarse=True)
            builder.store(builder.fadd(builder.load(slot), weight), slot)
            pair.append(rounded(weight))
            if rests is not None:
                kept = builder.bitcast(builder.and_(pair[-1], _same(0xFFFF << 16)), v.type)
                lost.append(rounded(builder.fsub(weight, kept)))
        write(pair, w_pointer, loop.index)
        if rests is not None:
            write(lost, rests, loop.index)
    v.store(builder.load(slot), t_pointer)


@intrinsic
def row_largest(typingctx, scores, at, count):
    """Returns the largest of the `count` scores from `at` on; count: a multiple of 16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, LANES)
        pointer = array_pointer(context, builder, scores, arguments[0], arguments[1])
        (slot,) = v.slots([v.constant(float("-inf"))])
        builder.store(v.constant(float("-inf")), slot)
        with cgutils.for_range_slice(builder, integer(0), arguments[2], integer(LANES)) as (index, _):
            builder.store(v.maximum(builder.load(slot), v.load(offset(builder, pointer, index))), slot)
        found = builder.load(slot)
        for distance in (8, 4, 2, 1):
            found = v.maximum(found, v.across(found, distance))
        return builder.extract_element(found, integer(0))

    return types.float32(scores, types.int64, types.int64), codegen


@intrinsic
def row_weights(typingctx, scores, at, count, factor, shift, weights, weights_at):
    """Write 2 ** (score * factor - shift) of `count` scores as bfloat16; returns their sum. count: a multiple of 16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, LANES)
        pointer = array_pointer(context, builder, scores, arguments[0], arguments[1])
        target = array_pointer(context, builder, weights, arguments[5], arguments[6])
        spread = [v.everywhere(each) for each in (arguments[3], builder.fneg(arguments[4]))]
        (slot,) = v.slots([v.zero])
        builder.store(v.zero, slot)
        with cgutils.for_range_slice(builder, integer(0), arguments[2], integer(LANES)) as (index, _):
            scaled = v.call("fmuladd", v.load(offset(builder, pointer, index)), *spread)
            weight = v.exp2(scaled, coarse=True)
            builder.store(builder.fadd(builder.load(slot), weight), slot)
            place = builder.bitcast(offset(builder, target, index), _HALVES.as_pointer())
            builder.store(builder.fptrunc(weight, _HALVES), place, align=2)
        found = builder.load(slot)
        for distance in (8, 4, 2, 1):
            found = builder.fadd(found, v.across(found, distance))
        return builder.extract_element(found, integer(0))

    real, at64 = types.float32, types.int64
    return types.float32(scores, at64, at64, real, real, weights, at64), codegen
