"""Coarse copies of keys in four bits a number: layout, and scores by int8 dot products, as LLVM vector code.

A copy stores each key's difference to its block's mean, scaled by the token's largest magnitude. Sixteen tokens form a
tile. A vector of codes holds eight channels of all tokens of a tile, token by token: four channels in the low halves of
bytes and four in the high halves. The tokens' scales follow a block's codes. Queries are quantized to int8.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.avx2_dots import group_dots
from hetero_kv.cpu_ops.exponential import LN_2
from hetero_kv.cpu_ops.simd import emit_tile
from hetero_kv.cpu_ops.storage import STORAGE_TYPES
from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, byte_pointer, integer, offset, prefetch_line
from hetero_kv.cpu_ops.weight_codes import call_intrinsic, load, splat
from hetero_kv.cpu_ops.weight_dots import add_dot

TOKENS, CHANNELS = 16, 8
"""Tokens of a tile, and channels of each token in a vector of codes."""
ZERO = 8
"""The code of 0."""
_LARGEST = 15
"""The largest code."""
_STEPS = 4
"""Vectors of codes whose products AVX2 sums in 16 bits."""
_SCALE_BYTES = 2
"""A token's scale, in half precision."""
_BYTES, _WORDS = ir.VectorType(ir.IntType(8), 4 * TOKENS), ir.VectorType(ir.IntType(32), TOKENS)
_FLOATS, _HALVES = ir.VectorType(ir.FloatType(), TOKENS), ir.VectorType(ir.HalfType(), TOKENS)


def bytes_of_block(block_size: int, k_dim: int) -> int:
    """Returns the bytes of the coarse copies of a block's keys, for one kv head."""
    return block_size * (-(-k_dim // CHANNELS) * CHANNELS // 2 + _SCALE_BYTES)


def _pointers(
    context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, places_kind: Any, places: ir.Value, count: int
) -> list[ir.Value]:
    """Returns pointers to an array's elements at the first `count` of `places`."""
    where = [array_pointer(context, builder, places_kind, places, integer(each)) for each in range(count)]
    return [array_pointer(context, builder, kind, array, builder.load(each)) for each in where]


@intrinsic(prefer_literal=True)
def mean_scores_of(typingctx, lanes, storage, dim, group, queries, blocks, tile, q, means, places, found, f_at):
    """Write products of a tile's queries and blocks' means to found[f_at + block * n + g], in whole vectors.

    queries: in each of the group's tiles; n: in this one. places: [blocks] int64, the offset of each block's mean in
    `means`.
    """
    width, name, size, of_group, of_tile, number = (
        each.literal_value for each in (lanes, storage, dim, group, queries, blocks)
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        q_pointer = array_pointer(context, builder, q, arguments[7], builder.mul(arguments[6], integer(of_tile * size)))
        f_pointer = array_pointer(context, builder, found, arguments[10], arguments[11])
        kind = STORAGE_TYPES[name]

        def score(_: ir.Value, rows: int) -> None:
            parts = [v.zero] * (rows * number)
            pointers = _pointers(context, builder, means, arguments[8], places, arguments[9], number)
            for start in range(0, size, width):
                lanes_left, within = min(width, size - start), start % kind.group
                stored = [
                    v.load(offset(builder, pointer, kind.units(start)), lanes_left, name, within)
                    for pointer in pointers
                ]
                for g in range(rows):
                    query = v.load(offset(builder, q_pointer, g * size + start), lanes_left)
                    for block, numbers in enumerate(stored):
                        cell = block * rows + g
                        parts[cell] = v.call("fmuladd", query, numbers, parts[cell])
            v.store(v.lane_sums(parts), f_pointer)

        emit_tile(builder, of_group, of_tile, arguments[6], score)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, storage, dim, group, queries, blocks, at, q, means, places, found, at), codegen


@intrinsic(prefer_literal=True)
def code_scores(
    typingctx, how, steps, group, queries, tokens, blocks, tile, codes, places, next_places, x, factors, zeros, shifts,
    s_at, scores,
):  # fmt: skip
    """Write blocks' token scores for a tile of n queries: scores[(block * n + g) * tokens + t].

    A score is factors[g] * scale * product + shifts[s_at + block * n + g]. queries: in each of the group's tiles.
    places, next_places: [blocks] int64, the offset of each block's codes in `codes`, and of those that are prefetched
    meanwhile: all lines at once would fill a core's queue, and the products would wait. x: [group, steps, 2] int32,
    four int8 numbers each. zeros: [group] int32, initial values of products; factors: [group], shifts: float32.
    """
    instruction = how.literal_value
    count, of_group, of_tile, size, at_once = (each.literal_value for each in (steps, group, queries, tokens, blocks))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def at(array: Any, argument: int, place: ir.Value) -> ir.Value:
            return array_pointer(context, builder, array, arguments[argument], place)

        def blocks_at(argument: int) -> list[ir.Value]:
            found = _pointers(context, builder, codes, arguments[7], places, arguments[argument], at_once)
            return [byte_pointer(builder, each) for each in found]

        pointers, next_pointers = blocks_at(8), blocks_at(9)
        first_query = builder.mul(arguments[6], integer(of_tile))
        numbers, target = at(x, 10, builder.mul(first_query, integer(2 * count))), at(scores, 15, integer(0))
        factor, zero = at(factors, 11, first_query), at(zeros, 12, first_query)
        shift = at(shifts, 13, arguments[14])
        low, four_bits = ir.Constant(_BYTES, [_LARGEST] * _BYTES.count), ir.Constant(_BYTES, [4] * _BYTES.count)

        def number(array: ir.Value, place: int) -> ir.Value:
            return splat(builder, builder.load(builder.gep(array, [integer(place)])))

        def codes_of(block: int, vector: ir.Value, half: int) -> ir.Value:
            place = builder.mul(vector, integer(_BYTES.count))
            both = load(builder, builder.gep(pointers[block], [place]), _BYTES)
            if half:
                return builder.lshr(both, four_bits)
            prefetch_line(builder, builder.gep(next_pointers[block], [place]), is_read_once=True)
            return builder.and_(both, low)

        def add_products(sums: list[list[ir.Value]], of_blocks: list[int], tokens_at: int) -> None:
            """Add the products of each block's tokens and each query to `sums`, in memory."""
            with cgutils.for_range(builder, integer(count)) as loop:
                vector = builder.add(loop.index, integer(tokens_at * count))
                for half in range(2):
                    parts = [codes_of(block, vector, half) for block in of_blocks]
                    for g in range(len(sums[0])):
                        index = builder.add(builder.mul(loop.index, integer(2)), integer(g * 2 * count + half))
                        four = builder.load(builder.gep(numbers, [index]))
                        for part, of_block in zip(parts, sums, strict=True):
                            product = add_dot(builder, instruction, builder.load(of_block[g]), part, four)
                            builder.store(product, of_block[g])

        def add_products_in_shorts(sums: list[ir.Value], block: int, tokens_at: int) -> None:
            """Add the products of a block's tokens and each query to `sums`, in memory, by AVX2."""

            def add(first: ir.Value, vectors: int) -> None:
                index = builder.mul(first, integer(2))
                rows = [offset(builder, numbers, builder.add(index, integer(g * 2 * count))) for g in range(len(sums))]
                addresses = [byte_pointer(builder, row) for row in rows]
                start = builder.add(first, integer(tokens_at * count))

                def codes(number: int) -> ir.Value:
                    return codes_of(block, builder.add(start, integer(number // 2)), number % 2)

                dots = group_dots(builder, _LARGEST, False, codes, range(vectors), addresses)
                for where, dot in zip(sums, dots, strict=True):
                    builder.store(builder.add(builder.load(where), dot), where)

            groups, left = divmod(count, _STEPS)
            with cgutils.for_range(builder, integer(groups)) as loop:
                add(builder.mul(loop.index, integer(_STEPS)), 2 * _STEPS)
            if left:
                add(integer(count - left), 2 * left)

        def score(of_blocks: list[int], tokens_at: int, rows: int) -> None:
            beginning = [number(zero, g) for g in range(rows)]
            sums = [[cgutils.alloca_once_value(builder, each) for each in beginning] for _ in of_blocks]
            if instruction == "avx2":
                (block,) = of_blocks
                add_products_in_shorts(sums[0], block, tokens_at)
            else:
                add_products(sums, of_blocks, tokens_at)
            for block, products in zip(of_blocks, sums, strict=True):
                scale_at = size // TOKENS * count * _BYTES.count + tokens_at * TOKENS * _SCALE_BYTES
                scales = builder.fpext(load(builder, pointers[block], _HALVES, scale_at), _FLOATS)
                prefetch_line(builder, builder.gep(next_pointers[block], [integer(scale_at)]), is_read_once=True)
                for g in range(rows):
                    found = builder.sitofp(builder.load(products[g]), _FLOATS)
                    by = builder.fmul(scales, number(factor, g))
                    found = call_intrinsic(
                        builder, f"llvm.fma.v{TOKENS}f32", _FLOATS, by, found, number(shift, block * rows + g)
                    )
                    place = offset(builder, target, (block * rows + g) * size + tokens_at * TOKENS)
                    builder.store(found, builder.bitcast(place, _FLOATS.as_pointer()), align=4)

        def score_blocks(_: ir.Value, rows: int) -> None:
            every = list(range(at_once))
            # AVX2 has registers for one block's.
            for of_blocks in [[block] for block in every] if instruction == "avx2" else [every]:
                for tokens_at in range(size // TOKENS):
                    score(of_blocks, tokens_at, rows)

        emit_tile(builder, of_group, of_tile, arguments[6], score_blocks)
        return context.get_dummy_value()

    at = types.int64
    literals = how, steps, group, queries, tokens, blocks
    return types.none(*literals, at, codes, places, next_places, x, factors, zeros, shifts, at, scores), codegen


@intrinsic(prefer_literal=True)
def row_masses(typingctx, lanes, group, queries, tokens, blocks, tile, scores, shifts, masses, at_place):
    """Write ln(sum(2 ** score)) + shift * ln 2 of each row's scores to `masses`.

    scores: [rows, tokens], with a row for each of `blocks` blocks and each query of a tile, as from `code_scores`.
    shifts: like `masses`, a number for each row from `at_place` on. Whole vectors are written; only as many numbers as
    there are rows are meaningful.
    """
    width, of_group, of_tile, size, at_once = (each.literal_value for each in (lanes, group, queries, tokens, blocks))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        pointer = array_pointer(context, builder, scores, arguments[6], integer(0))
        shifts_at, masses_at = (
            array_pointer(context, builder, array, arguments[which], arguments[9])
            for array, which in ((shifts, 7), (masses, 8))
        )

        def powers(of_rows: list[list[ir.Value]], largest: ir.Value | None) -> ir.Value:
            """The sums of 2 ** (score - largest), or of 2 ** min(score, 127)."""
            sums = []
            for g, row in enumerate(of_rows):
                if largest is None:
                    less = [v.minimum(vector, v.constant(127)) for vector in row]
                else:
                    shift = v.lane_everywhere(largest, g)
                    less = [builder.fsub(vector, shift) for vector in row]
                sums.append(_joined(builder.fadd, [v.exp2(vector, coarse=True) for vector in less]))
            return v.lane_sums(sums)

        def add(_: ir.Value, of_this: int) -> None:
            rows = at_once * of_this

            def loaded() -> list[list[ir.Value]]:
                return [
                    [v.load(offset(builder, pointer, row * size + t)) for t in range(0, size, width)]
                    for row in range(rows)
                ]

            def write(shift: ir.Value, sums: ir.Value) -> None:
                mass = builder.fadd(shift, v.log2(sums))
                v.store(builder.fmul(mass, v.constant(float(LN_2))), masses_at)

            shift, sums = v.load(shifts_at), powers(loaded(), None)
            # Scores that are differences to the block's mean are around 0. Others may leave float32's range.
            in_range = builder.and_(
                builder.fcmp_ordered(">", sums, v.constant(2.0**-64)),
                builder.fcmp_ordered("<", sums, v.constant(2.0**126)),
            )
            unused = ir.Constant(in_range.type, [row >= rows for row in range(width)])
            mask = builder.bitcast(builder.or_(in_range, unused), ir.IntType(width))
            with builder.if_else(builder.icmp_signed("==", mask, ir.Constant(mask.type, -1)), likely=True) as (
                near,
                far,
            ):
                with near:
                    write(shift, sums)
                with far:
                    of_rows = loaded()
                    largest = v.lane_maxima([_joined(v.maximum, row) for row in of_rows])
                    write(builder.fadd(shift, largest), powers(of_rows, largest))

        emit_tile(builder, of_group, of_tile, arguments[5], add)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, group, queries, tokens, blocks, at, scores, shifts, masses, at), codegen


@intrinsic(prefer_literal=True)
def copy_natural(typingctx, lanes, count, scores, s_at, target, t_at):
    """Write target[t_at + i] = scores[s_at + i] * ln 2 for the first `count` numbers, whole vectors of them."""
    width, number = lanes.literal_value, count.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        source = array_pointer(context, builder, scores, arguments[2], arguments[3])
        to = array_pointer(context, builder, target, arguments[4], arguments[5])
        for start in range(0, number, width):
            v.store(
                builder.fmul(v.load(offset(builder, source, start)), v.constant(float(LN_2))),
                offset(builder, to, start),
            )
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, count, scores, at, target, at), codegen


def _joined(join: Callable[[ir.Value, ir.Value], ir.Value], vectors: list[ir.Value]) -> ir.Value:
    found = vectors[0]
    for vector in vectors[1:]:
        found = join(found, vector)
    return found
