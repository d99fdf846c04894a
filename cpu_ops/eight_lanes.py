"""Register-blocked inner loops with eight lanes, for ShadowKV's kernels; `cpu_ops.simd` has loops of any width.

Numba's vectoriser reloads every query element for each key. These intrinsics keep a tile of partial sums (queries x
tokens, or queries x columns) in vector registers, so that each stored element is loaded and widened once for several
queries. Storage type, dims and tile sizes are literals and become constants of the generated code. Arrays are
addressed as (array, offset in elements) in the flat view of a C-contiguous array.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from cpu_ops.storage import FLOAT, STORAGE_TYPES

LANES = 8
QUERY_TILE = 4
"""The largest number of queries in a register tile."""
_ACCUMULATORS = 8
"""Vectors of partial sums in a tile: enough to cover the latency of two multiply-adds a cycle. With the operands they
fit into AVX2's 16 registers. Wider vectors and larger tiles gained nothing on AVX-512."""
_INT = ir.IntType(64)


def token_tile(queries: int, block_size: int) -> int:
    """Returns the tokens of a register tile for `queries` queries: the most that fit registers and divide a block."""
    tile = 1
    while 2 * tile * queries <= _ACCUMULATORS and block_size % (2 * tile) == 0:
        tile *= 2
    return tile


def query_tiles(group: int) -> tuple[int, int, int]:
    """Split `group` queries into register tiles: (full tiles, queries in each, queries left over)."""
    tiles = -(-group // QUERY_TILE)
    size = -(-group // tiles)
    return group // size, size, group % size


def _pieces(dim: int) -> list[tuple[int, int]]:
    return [(start, min(LANES, dim - start)) for start in range(0, dim, LANES)]


def _pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, at: ir.Value) -> ir.Value:
    return builder.gep(make_array(array_type)(context, builder, array).data, [at])


def _offset(builder: ir.IRBuilder, pointer: ir.Value, elements: int | ir.Value) -> ir.Value:
    index = ir.Constant(_INT, elements) if isinstance(elements, int) else elements
    return builder.gep(pointer, [index])


def _resized(builder: ir.IRBuilder, vector: ir.Value, lanes: int) -> ir.Value:
    """Returns the first lanes of `vector`, padded with zeros."""
    have = vector.type.count
    if have == lanes:
        return vector
    zeros = ir.Constant(vector.type, None)
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [min(i, have) for i in range(lanes)])
    return builder.shuffle_vector(vector, zeros, mask)


def _load(builder: ir.IRBuilder, storage: str, pointer: ir.Value, lanes: int, within: int = 0) -> ir.Value:
    """Returns LANES float32 decoded from a group of `storage` at `pointer`; only `lanes` of them are read."""
    return _resized(builder, STORAGE_TYPES[storage].decode(builder, pointer, within, lanes), LANES)


def _store(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value, lanes: int) -> None:
    part = _resized(builder, vector, lanes)
    builder.store(part, builder.bitcast(pointer, part.type.as_pointer()), align=4)


def _broadcast(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    vector = ir.VectorType(FLOAT, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), builder.load(pointer), ir.Constant(_INT, 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def _call(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> ir.Value:
    kind = operands[0].type
    signature = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, operands)


def _lane_sums(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Returns the horizontal sums of up to LANES vectors as one vector, by a tree of shuffles and additions.

    Each level adds pairs of vectors and leaves half as many, filled twice as densely. The first two levels stay within
    128-bit lanes, where shuffles are cheapest.
    """
    level = vectors + [ir.Constant(vectors[0].type, None)] * (LANES - len(vectors))
    width = 1
    while len(level) > 1:
        low, high = _pair_masks(width)
        level = [
            builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
        width *= 2
    return level[0]


def _pair_masks(width: int) -> tuple[ir.Constant, ir.Constant]:
    low: list[int] = []
    high: list[int] = []
    for start in range(0, LANES, max(4, 2 * width)):
        if width == 1:
            low += [start, LANES + start, start + 1, LANES + start + 1]
            high += [start + 2, LANES + start + 2, start + 3, LANES + start + 3]
        else:
            low += [source + start + lane for source in (0, LANES) for lane in range(width)]
            high += [source + start + width + lane for source in (0, LANES) for lane in range(width)]
    kind = ir.VectorType(ir.IntType(32), LANES)
    return ir.Constant(kind, low), ir.Constant(kind, high)


def _prefetch_lines(builder: ir.IRBuilder, pointer: ir.Value, count: ir.Value) -> None:
    byte, flag = ir.IntType(8), ir.IntType(32)
    itemsize = pointer.type.pointee.width // 8 if isinstance(pointer.type.pointee, ir.IntType) else 4
    first = builder.bitcast(pointer, byte.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(flag, value) for value in (0, 2, 1))
    stop = builder.mul(count, ir.Constant(_INT, itemsize))
    with cgutils.for_range_slice(builder, ir.Constant(_INT, 0), stop, ir.Constant(_INT, 64)) as (line, _):
        builder.call(function, [builder.gep(first, [line]), read, second_level, data])


@intrinsic(prefer_literal=True)
def score_tile(typingctx, mode, storage, dim, queries, tokens, q, q_at, keys, k_at, scores, s_at, s_stride):
    """Score a tile of stored vectors: scores[s_at + g * s_stride + t] for g < queries, t < tokens.

    mode "dot": the inner product of query g and vector t. mode "quest": vectors come in pairs (maximum, minimum), and
    the score is the upper bound sum_d max(q_d * max_d, q_d * min_d) (Quest, algorithm 1).
    """
    bound = mode.literal_value == "quest"
    name, size, rows, columns = (a.literal_value for a in (storage, dim, queries, tokens))
    kind = STORAGE_TYPES[name]
    stride, step = kind.units(size), max(LANES, kind.group)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        q_pointer = _pointer(context, builder, q, arguments[5], arguments[6])
        k_pointer = _pointer(context, builder, keys, arguments[7], arguments[8])
        s_pointer = _pointer(context, builder, scores, arguments[9], arguments[10])
        zero = ir.Constant(ir.VectorType(FLOAT, LANES), None)
        # LLVM keeps these stack slots in registers, because their addresses do not escape.
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * columns)]

        def add_piece(start: ir.Value, lanes: int, within: int = 0) -> None:
            groups = builder.udiv(start, ir.Constant(_INT, step))
            k_start = _offset(builder, k_pointer, builder.mul(groups, ir.Constant(_INT, kind.units(step))))
            q_start = _offset(builder, _offset(builder, q_pointer, start), within)
            stored = [
                _load(builder, name, _offset(builder, k_start, t * stride), lanes, within)
                for t in range(2 * columns if bound else columns)
            ]
            for g in range(rows):
                query = _load(builder, "float32", _offset(builder, q_start, g * size), lanes)
                for t in range(columns):
                    cell = sums[g * columns + t]
                    if bound:
                        most, least = (builder.fmul(query, stored[2 * t + side]) for side in (0, 1))
                        added = builder.fadd(builder.load(cell), _call(builder, "maxnum", most, least))
                    else:
                        added = _call(builder, "fmuladd", query, stored[t], builder.load(cell))
                    builder.store(added, cell)

        whole = ir.Constant(_INT, size - size % LANES)
        # A loop rather than unrolled code, in which the scheduler hoists loads until the partial sums spill.
        with cgutils.for_range_slice(builder, ir.Constant(_INT, 0), whole, ir.Constant(_INT, step)) as (start, _):
            for within in range(0, step, LANES):
                add_piece(start, LANES, within)
        if size % LANES:
            add_piece(whole, size % LANES)
        for first in range(0, rows * columns, LANES):
            part = [builder.load(cell) for cell in sums[first : first + LANES]]
            total = _lane_sums(builder, part)
            for slot in range(first, first + len(part)):
                g, t = divmod(slot, columns)
                row = builder.mul(arguments[11], ir.Constant(_INT, g))
                target = _offset(builder, _offset(builder, s_pointer, row), t)
                builder.store(builder.extract_element(total, ir.Constant(_INT, slot - first)), target)
        return context.get_dummy_value()

    integer = types.int64
    return types.none(mode, storage, dim, queries, tokens, q, integer, keys, integer, scores, integer, integer), codegen


@intrinsic(prefer_literal=True)
def accumulate_rows(
    typingctx,
    storage,
    dim,
    queries,
    p,
    p_at,
    p_stride,
    values,
    v_at,
    count,
    sums,
    sums_at,
    ahead,
    ahead_at,
    ahead_count,
):
    """Add weighted rows: sums[g * dim + d] += sum over t < count of p[g * p_stride + t] * value d of row t.

    Meanwhile `ahead_count` elements of `ahead` are prefetched, a few at a time: a core has only about twenty cache-line
    requests in flight, and more would stall the arithmetic.
    """
    name, size, rows = (a.literal_value for a in (storage, dim, queries))
    kind = STORAGE_TYPES[name]
    pieces = _pieces(size)
    columns = max(1, _ACCUMULATORS // max(1, rows))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        p_pointer = _pointer(context, builder, p, arguments[3], arguments[4])
        v_pointer = _pointer(context, builder, values, arguments[6], arguments[7])
        s_pointer = _pointer(context, builder, sums, arguments[9], arguments[10])
        stride, steps = arguments[5], arguments[8]
        weights = [_offset(builder, p_pointer, builder.mul(stride, ir.Constant(_INT, g))) for g in range(rows)]
        tiles = [pieces[first : first + columns] for first in range(0, len(pieces), columns)]
        share = builder.sdiv(arguments[13], ir.Constant(_INT, len(tiles)))
        ahead_pointer = _pointer(context, builder, ahead, arguments[11], arguments[12])
        for number, tile in enumerate(tiles):
            _prefetch_lines(
                builder, _offset(builder, ahead_pointer, builder.mul(share, ir.Constant(_INT, number))), share
            )
            cells = [(g, start, lanes) for g in range(rows) for start, lanes in tile]
            targets = [_offset(builder, s_pointer, g * size + start) for g, start, _ in cells]
            slots = [
                cgutils.alloca_once_value(builder, _load(builder, "float32", target, lanes))
                for target, (_, _, lanes) in zip(targets, cells, strict=True)
            ]
            with cgutils.for_range(builder, steps) as loop:
                row = _offset(builder, v_pointer, builder.mul(loop.index, ir.Constant(_INT, kind.units(size))))
                stored = {
                    start: _load(builder, name, _offset(builder, row, kind.units(start)), lanes, start % kind.group)
                    for start, lanes in tile
                }
                weight = [_broadcast(builder, _offset(builder, pointer, loop.index)) for pointer in weights]
                for slot, (g, start, _) in zip(slots, cells, strict=True):
                    builder.store(_call(builder, "fmuladd", weight[g], stored[start], builder.load(slot)), slot)
            for slot, target, (_, _, lanes) in zip(slots, targets, cells, strict=True):
                _store(builder, builder.load(slot), target, lanes)
        return context.get_dummy_value()

    integer = types.int64
    kinds = (
        storage,
        dim,
        queries,
        p,
        integer,
        integer,
        values,
        integer,
        integer,
        sums,
        integer,
        ahead,
        integer,
        integer,
    )
    return types.none(*kinds), codegen


@intrinsic
def prefetch(typingctx, array, at, count):
    """Prefetch `count` elements of an array from offset `at` on into the L2 cache."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _prefetch_lines(builder, _pointer(context, builder, array, arguments[0], arguments[1]), arguments[2])
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), codegen
