"""Register-blocked inner loops of the kernels, emitted as LLVM vector code.

Numba's vectoriser reloads every query element for each key. These intrinsics keep a tile of partial sums (queries x
tokens, or queries x columns) in vector registers, so that each stored element is loaded and widened once for several
queries. Lanes, storage type, dims and tile sizes (`cpu_ops.tiles`) are literals and become constants of the generated
code. Arrays are addressed as (array, offset in elements) in the flat view of a C-contiguous array.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cpu_ops.storage import STORAGE_TYPES
from cpu_ops.vectors import Vectors, array_pointer, byte_pointer, integer, offset, prefetch_line, prefetch_lines


def emit_score_rows(
    v: Vectors, storage: str, size: int, rows: int, columns: int, pitch: int, q: ir.Value, k: ir.Value, scores: ir.Value
) -> None:
    """Emit the code of `score_rows`, on pointers."""
    parts = _tile_products(v, storage, size, "dot", rows, columns, q, k)
    leaves = [parts[g * columns + t] if g < rows else v.zero for t in range(columns) for g in range(pitch)]
    for first in range(0, len(leaves), v.lanes):
        v.store(v.lane_sums(leaves[first : first + v.lanes]), offset(v.builder, scores, first))


def _tile_products(
    v: Vectors, storage: str, size: int, mode: str, rows: int, columns: int, q: ir.Value, k: ir.Value
) -> list[ir.Value]:
    """Returns vectors; the lanes of vector g * columns + t sum to the score of query g and token t.

    mode: as for `score_tile`.
    """
    builder, kind = v.builder, STORAGE_TYPES[storage]
    bound = mode == "quest"
    stride, step = kind.units(size), max(v.lanes, kind.group)
    sums = v.slots([v.zero] * (rows * columns))

    def add_piece(start: ir.Value, lanes: int, within: int = 0) -> None:
        groups = builder.udiv(start, integer(step))
        k_start = offset(builder, k, builder.mul(groups, integer(kind.units(step))))
        q_start = offset(builder, offset(builder, q, start), within)
        stored = [
            v.load(offset(builder, k_start, t * stride), lanes, storage, within)
            for t in range(2 * columns if bound else columns)
        ]
        for g in range(rows):
            query = v.load(offset(builder, q_start, g * size), lanes)
            for t in range(columns):
                cell = sums[g * columns + t]
                if bound:
                    most, least = (builder.fmul(query, stored[2 * t + side]) for side in (0, 1))
                    added = builder.fadd(builder.load(cell), v.call("maxnum", most, least))
                elif mode == "squares":
                    product = builder.fmul(query, stored[t])
                    added = v.call("fmuladd", product, product, builder.load(cell))
                else:
                    added = v.call("fmuladd", query, stored[t], builder.load(cell))
                builder.store(added, cell)

    whole = integer(size - size % v.lanes)
    # A loop rather than unrolled code, in which the scheduler hoists loads until the partial sums spill.
    with cgutils.for_range_slice(builder, integer(0), whole, integer(step)) as (start, _):
        for within in range(0, step, v.lanes):
            add_piece(start, v.lanes, within)
    if size % v.lanes:
        add_piece(whole, size % v.lanes)
    return [builder.load(cell) for cell in sums]


@intrinsic(prefer_literal=True)
def score_tile(typingctx, lanes, mode, storage, dim, queries, q, q_at, keys, k_at, scores, s_at, s_stride):
    """Score a stored vector for a tile of queries: write scores[s_at + g * s_stride] for g < queries.

    mode "dot": the inner product of query g and the vector. mode "quest": two vectors are stored, maximum and minimum;
    the score is the upper bound sum_d max(q_d * max_d, q_d * min_d) (Quest, algorithm 1). mode "squares":
    sum_d (q_d * r_d)^2.
    """
    width, how, name, size, rows = (a.literal_value for a in (lanes, mode, storage, dim, queries))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        q_pointer = array_pointer(context, builder, q, arguments[5], arguments[6])
        k_pointer = array_pointer(context, builder, keys, arguments[7], arguments[8])
        s_pointer = array_pointer(context, builder, scores, arguments[9], arguments[10])
        parts = _tile_products(v, name, size, how, rows, 1, q_pointer, k_pointer)
        for first in range(0, rows, width):
            total = v.lane_sums(parts[first : first + width])
            for g in range(first, min(rows, first + width)):
                target = offset(builder, s_pointer, builder.mul(arguments[11], integer(g)))
                builder.store(builder.extract_element(total, integer(g - first)), target)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, mode, storage, dim, queries, q, at, keys, at, scores, at, at), codegen


@intrinsic(prefer_literal=True)
def score_rows(typingctx, lanes, storage, dim, queries, tokens, row, q, q_at, keys, k_at, scores, s_at):
    """Score a tile of tokens for a tile of queries: write scores[s_at + t * row + g].

    row: a power of two, at least `queries`. Whole vectors are written: up to `lanes` - 1 numbers after the last row are
    overwritten.
    """
    width, name, size, rows, columns, pitch = (a.literal_value for a in (lanes, storage, dim, queries, tokens, row))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        q_pointer = array_pointer(context, builder, q, arguments[6], arguments[7])
        k_pointer = array_pointer(context, builder, keys, arguments[8], arguments[9])
        s_pointer = array_pointer(context, builder, scores, arguments[10], arguments[11])
        emit_score_rows(v, name, size, rows, columns, pitch, q_pointer, k_pointer, s_pointer)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, storage, dim, queries, tokens, row, q, at, keys, at, scores, at), codegen


def emit_accumulate_rows(
    v: Vectors, storage: str, size: int, rows: int, pitch: int, most: int, stretch: int,
    p: ir.Value, values: ir.Value, count: ir.Value, sums: ir.Value, ahead: ir.Value, places: ir.Value | None = None,
) -> None:  # fmt: skip
    """Emit the code of `accumulate_rows`, on pointers; places: int64, row indices in `values` (None: in order)."""
    builder, kind = v.builder, STORAGE_TYPES[storage]
    pieces = [(start, min(v.lanes, size - start)) for start in range(0, size, v.lanes)]
    tiles = [pieces[first : first + most] for first in range(0, len(pieces), most)]
    lines = list(range(0, stretch, 64))
    for number, tile in enumerate(tiles):
        cells = [(g, start, part) for g in range(rows) for start, part in tile]
        targets = [offset(builder, sums, g * size + start) for g, start, _ in cells]
        slots = v.slots([v.load(target, part) for target, (_, _, part) in zip(targets, cells, strict=True)])
        with cgutils.for_range(builder, count) as loop:
            ahead_row = offset(builder, ahead, builder.mul(loop.index, integer(stretch)))
            for place in lines[number :: len(tiles)]:
                prefetch_line(builder, offset(builder, ahead_row, place))
            row = loop.index if places is None else builder.load(offset(builder, places, loop.index))
            value_row = offset(builder, values, builder.mul(row, integer(kind.units(size))))
            stored = {
                start: v.load(offset(builder, value_row, kind.units(start)), part, storage, start % kind.group)
                for start, part in tile
            }
            weight_row = offset(builder, p, builder.mul(loop.index, integer(pitch)))
            weight = [v.broadcast(offset(builder, weight_row, g)) for g in range(rows)]
            for slot, (g, start, _) in zip(slots, cells, strict=True):
                builder.store(v.call("fmuladd", weight[g], stored[start], builder.load(slot)), slot)
        for slot, target, (_, _, part) in zip(slots, targets, cells, strict=True):
            v.store(builder.load(slot), target, part)


@intrinsic(prefer_literal=True)
def accumulate_rows(
    typingctx, lanes, storage, dim, queries, row, columns, p, p_at, values, v_at, count, sums, sums_at,
    ahead, ahead_at, ahead_bytes,
):  # fmt: skip
    """Add weighted rows: sums[g * dim + d] += sum over t < count of p[t * row + g] * value d of row t.

    Meanwhile each row prefetches the next `ahead_bytes` of `ahead`: a core has only about twenty cache-line requests in
    flight, and more at once would stall the arithmetic.
    """
    width, name, size, rows, pitch, most = (a.literal_value for a in (lanes, storage, dim, queries, row, columns))
    stretch = ahead_bytes.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        p_pointer = array_pointer(context, builder, p, arguments[6], arguments[7])
        v_pointer = array_pointer(context, builder, values, arguments[8], arguments[9])
        s_pointer = array_pointer(context, builder, sums, arguments[11], arguments[12])
        following = byte_pointer(builder, array_pointer(context, builder, ahead, arguments[13], arguments[14]))
        v = Vectors(builder, width)
        emit_accumulate_rows(
            v, name, size, rows, pitch, most, stretch, p_pointer, v_pointer, arguments[10], s_pointer, following
        )
        return context.get_dummy_value()

    at = types.int64
    kinds = (lanes, storage, dim, queries, row, columns, p, at, values, at, at, sums, at, ahead, at, ahead_bytes)
    return types.none(*kinds), codegen


@intrinsic(prefer_literal=True)
def accumulate_rows_at(
    typingctx, lanes, storage, dim, queries, row, columns, p, p_at, values, places, count, sums, sums_at
):
    """As `accumulate_rows`, for the value rows places[t], int64, t < count, without prefetching."""
    width, name, size, rows, pitch, most = (a.literal_value for a in (lanes, storage, dim, queries, row, columns))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        p_pointer = array_pointer(context, builder, p, arguments[6], arguments[7])
        v_pointer = array_pointer(context, builder, values, arguments[8], integer(0))
        place_pointer = array_pointer(context, builder, places, arguments[9], integer(0))
        s_pointer = array_pointer(context, builder, sums, arguments[11], arguments[12])
        v = Vectors(builder, width)
        nothing = byte_pointer(builder, v_pointer)
        emit_accumulate_rows(
            v, name, size, rows, pitch, most, 0, p_pointer, v_pointer, arguments[10], s_pointer, nothing, place_pointer
        )
        return context.get_dummy_value()

    at = types.int64
    kinds = (lanes, storage, dim, queries, row, columns, p, at, values, places, at, sums, at)
    return types.none(*kinds), codegen


@intrinsic
def prefetch(typingctx, array, at, count):
    """Prefetch `count` elements of an array from offset `at` on into the L1 cache."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        prefetch_lines(builder, array_pointer(context, builder, array, arguments[0], arguments[1]), arguments[2])
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), codegen
