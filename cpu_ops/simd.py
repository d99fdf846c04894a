"""Register-blocked inner loops of the kernels, emitted as LLVM vector code.

Numba's vectoriser reloads every query element for each key. These intrinsics keep a tile of partial sums (queries x
tokens, or queries x columns) in vector registers, so that each stored element is loaded and widened once for several
queries. Lanes, storage type, dims and tile sizes (`cpu_ops.tiles`) are literals and become constants of the generated
code. Arrays are addressed as (array, offset in elements) in the flat view of a C-contiguous array.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.storage import STORAGE_TYPES
from hetero_kv.cpu_ops.vectors import (
    Vectors,
    array_pointer,
    byte_pointer,
    integer,
    offset,
    prefetch_line,
    prefetch_lines,
)


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


def emit_tiles(builder: ir.IRBuilder, group: int, queries: int, body: Callable[[ir.Value, int], None]) -> None:
    """Emit `body(tile, rows)` for the tiles of a group of queries: `queries` in each, and the rest in the last one."""
    full, rest = divmod(group, queries)
    if full == 1:
        body(integer(0), queries)
    else:
        with cgutils.for_range(builder, integer(full)) as loop:
            body(loop.index, queries)
    if rest:
        body(integer(full), rest)


def emit_tile(
    builder: ir.IRBuilder, group: int, queries: int, tile: ir.Value, body: Callable[[ir.Value, int], None]
) -> None:
    """Emit `body(tile, rows)` for one tile, known at run time, of those of `emit_tiles`."""
    full, rest = divmod(group, queries)
    if not rest:
        body(tile, queries)
        return
    with builder.if_else(builder.icmp_signed("<", tile, integer(full))) as (whole, remaining):
        with whole:
            body(tile, queries)
        with remaining:
            body(tile, rest)


@intrinsic(prefer_literal=True)
def score_tile(
    typingctx, lanes, mode, storage, dim, group, queries, tokens, q, q_at, keys, k_at, scores, s_at, s_stride
):
    """Score stored vectors for a group of queries: write scores[s_at + g * s_stride + t] for g < group, t < tokens.

    mode "dot": the inner product of query g and vector t. mode "quest": vectors come in pairs, maximum and minimum; the
    score is the upper bound sum_d max(q_d * max_d, q_d * min_d) (Quest, algorithm 1). mode "squares":
    sum_d (q_d * r_d)^2. queries: of a register tile.
    """
    width, how, name, size, of_group, of_tile, columns = (
        a.literal_value for a in (lanes, mode, storage, dim, group, queries, tokens)
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        q_pointer = array_pointer(context, builder, q, arguments[7], arguments[8])
        k_pointer = array_pointer(context, builder, keys, arguments[9], arguments[10])
        s_pointer = array_pointer(context, builder, scores, arguments[11], arguments[12])

        def score(tile: ir.Value, rows: int) -> None:
            first_query = builder.mul(tile, integer(of_tile))
            query = offset(builder, q_pointer, builder.mul(first_query, integer(size)))
            parts = _tile_products(v, name, size, how, rows, columns, query, k_pointer)
            for first in range(0, rows * columns, width):
                total = v.lane_sums(parts[first : first + width])
                for cell in range(first, min(rows * columns, first + width)):
                    g, t = divmod(cell, columns)
                    row = builder.mul(arguments[13], builder.add(first_query, integer(g)))
                    target = offset(builder, offset(builder, s_pointer, row), t)
                    builder.store(builder.extract_element(total, integer(cell - first)), target)

        emit_tiles(builder, of_group, of_tile, score)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, mode, storage, dim, group, queries, tokens, q, at, keys, at, scores, at, at), codegen


@intrinsic(prefer_literal=True)
def score_rows(typingctx, lanes, storage, dim, group, queries, tokens, row, q, q_at, keys, k_at, scores, s_at, s_tile):
    """Score a tile of tokens for a group of queries: write scores[s_at + tile * s_tile + t * row + g].

    g counts the queries of a register tile, `queries` at most. row: a power of two, at least `queries`. Whole vectors
    are written: up to `lanes` - 1 numbers after the last row of each tile are overwritten.
    """
    width, name, size, of_group, of_tile, columns, pitch = (
        a.literal_value for a in (lanes, storage, dim, group, queries, tokens, row)
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        q_pointer = array_pointer(context, builder, q, arguments[7], arguments[8])
        k_pointer = array_pointer(context, builder, keys, arguments[9], arguments[10])
        s_pointer = array_pointer(context, builder, scores, arguments[11], arguments[12])

        def score(tile: ir.Value, rows: int) -> None:
            query = offset(builder, q_pointer, builder.mul(tile, integer(of_tile * size)))
            target = offset(builder, s_pointer, builder.mul(tile, arguments[13]))
            emit_score_rows(v, name, size, rows, columns, pitch, query, k_pointer, target)

        emit_tiles(builder, of_group, of_tile, score)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, storage, dim, group, queries, tokens, row, q, at, keys, at, scores, at, at), codegen


def _times(builder: ir.IRBuilder, step: ir.Value | int, count: int) -> ir.Value | int:
    return step * count if isinstance(step, int) else builder.mul(step, integer(count))


def emit_accumulate_rows(
    v: Vectors, storage: str, size: int, rows: int, pitch: int, most: int, stretch: int,
    p: ir.Value, values: ir.Value, count: ir.Value, sums: ir.Value, ahead: ir.Value, places: ir.Value | None = None,
    apart: ir.Value | int = 1, next_places: ir.Value | None = None,
) -> None:  # fmt: skip
    """Emit the code of `accumulate_rows`, on pointers.

    places: int64, row indices in `values` (None: in order). next_places: int64, indices of rows of `stretch` bytes in
    `ahead` (None: in order).
    """
    builder, kind = v.builder, STORAGE_TYPES[storage]
    pieces = [(start, min(v.lanes, size - start)) for start in range(0, size, v.lanes)]
    tiles = [pieces[first : first + most] for first in range(0, len(pieces), most)]
    lines = list(range(0, stretch, 64))
    for number, tile in enumerate(tiles):
        cells = [(g, start, part) for g in range(rows) for start, part in tile]
        targets = [offset(builder, sums, g * size + start) for g, start, _ in cells]
        slots = v.slots([v.load(target, part) for target, (_, _, part) in zip(targets, cells, strict=True)])
        with cgutils.for_range(builder, count) as loop:
            next_row = loop.index if next_places is None else builder.load(offset(builder, next_places, loop.index))
            ahead_row = offset(builder, ahead, builder.mul(next_row, integer(stretch)))
            for place in lines[number :: len(tiles)]:
                prefetch_line(builder, offset(builder, ahead_row, place))
            row = loop.index if places is None else builder.load(offset(builder, places, loop.index))
            value_row = offset(builder, values, builder.mul(row, integer(kind.units(size))))
            stored = {
                start: v.load(offset(builder, value_row, kind.units(start)), part, storage, start % kind.group)
                for start, part in tile
            }
            weight_row = offset(builder, p, builder.mul(loop.index, integer(pitch)))
            weight = [v.broadcast(offset(builder, weight_row, _times(builder, apart, g))) for g in range(rows)]
            for slot, (g, start, _) in zip(slots, cells, strict=True):
                builder.store(v.call("fmuladd", weight[g], stored[start], builder.load(slot)), slot)
        for slot, target, (_, _, part) in zip(slots, targets, cells, strict=True):
            v.store(builder.load(slot), target, part)


@intrinsic(prefer_literal=True)
def accumulate_rows(
    typingctx, lanes, storage, dim, group, queries, row, columns, p, p_at, p_tile, p_apart, values, v_at, count, sums,
    ahead, ahead_at, ahead_tile, ahead_bytes,
):  # fmt: skip
    """Add weighted rows for a group of queries: sums[g * dim + d] += sum over t < count of weight * value d of row t.

    The weight is p[p_at + tile * p_tile + t * row + i * p_apart] for query i of a register tile of `queries`. Meanwhile
    each row prefetches the next `ahead_bytes` of `ahead` from ahead_at + tile * ahead_tile on: a core has only about
    twenty cache-line requests in flight, and more at once would stall the arithmetic.
    """
    width, name, size, of_group, of_tile, pitch, most = (
        a.literal_value for a in (lanes, storage, dim, group, queries, row, columns)
    )
    stretch = ahead_bytes.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        p_pointer = array_pointer(context, builder, p, arguments[7], arguments[8])
        v_pointer = array_pointer(context, builder, values, arguments[11], arguments[12])
        s_pointer = array_pointer(context, builder, sums, arguments[14], integer(0))
        a_pointer = array_pointer(context, builder, ahead, arguments[15], arguments[16])
        v = Vectors(builder, width)

        def add(tile: ir.Value, rows: int) -> None:
            weights = offset(builder, p_pointer, builder.mul(tile, arguments[9]))
            target = offset(builder, s_pointer, builder.mul(tile, integer(of_tile * size)))
            following = byte_pointer(builder, offset(builder, a_pointer, builder.mul(tile, arguments[17])))
            emit_accumulate_rows(
                v, name, size, rows, pitch, most, stretch, weights, v_pointer, arguments[13], target, following,
                apart=arguments[10],
            )  # fmt: skip

        emit_tiles(builder, of_group, of_tile, add)
        return context.get_dummy_value()

    at = types.int64
    literals = lanes, storage, dim, group, queries, row, columns
    return types.none(*literals, p, at, at, at, values, at, at, sums, ahead, at, at, ahead_bytes), codegen


@intrinsic(prefer_literal=True)
def accumulate_rows_at(
    typingctx, lanes, storage, dim, group, queries, row, columns, p, p_tile, values, places, next_places, count, sums
):
    """As `accumulate_rows`, for the value rows places[t], int64, t < count; p_at is 0.

    Meanwhile the rows next_places[t] are prefetched (None: none are).
    """
    width, name, size, of_group, of_tile, pitch, most = (
        a.literal_value for a in (lanes, storage, dim, group, queries, row, columns)
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        p_pointer = array_pointer(context, builder, p, arguments[7], integer(0))
        v_pointer = array_pointer(context, builder, values, arguments[9], integer(0))
        place_pointer = array_pointer(context, builder, places, arguments[10], integer(0))
        s_pointer = array_pointer(context, builder, sums, arguments[13], integer(0))
        v, stretch, next_pointer = Vectors(builder, width), 0, None
        if next_places != types.none:
            kind = STORAGE_TYPES[name]
            stretch = kind.units(size) * kind.kernel_dtype.itemsize
            next_pointer = array_pointer(context, builder, next_places, arguments[11], integer(0))

        def add(tile: ir.Value, rows: int) -> None:
            weights = offset(builder, p_pointer, builder.mul(tile, arguments[8]))
            target = offset(builder, s_pointer, builder.mul(tile, integer(of_tile * size)))
            emit_accumulate_rows(
                v, name, size, rows, pitch, most, stretch, weights, v_pointer, arguments[12], target,
                byte_pointer(builder, v_pointer), place_pointer, next_places=next_pointer,
            )  # fmt: skip

        emit_tiles(builder, of_group, of_tile, add)
        return context.get_dummy_value()

    at = types.int64
    literals = lanes, storage, dim, group, queries, row, columns
    return types.none(*literals, p, at, values, places, next_places, at, sums), codegen


@intrinsic
def prefetch(typingctx, array, at, count):
    """Prefetch `count` elements of an array from offset `at` on into the L1 cache."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        prefetch_lines(builder, array_pointer(context, builder, array, arguments[0], arguments[1]), arguments[2])
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), codegen
