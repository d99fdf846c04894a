"""Packed matrices of 16-bit numbers, F16 and BF16: packing in tiles, products in float32, reading of single rows.

A tile stores its columns of sixteen rows one after the other. A load and a conversion yield a vector of weights, which
is multiplied with one activation. Activations are not rounded.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.weight_codes import DOTS_SIGNATURE, call_intrinsic, load, prefetch_bytes, splat
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

_I16, _I32, _I64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, TILE) for kind in (_FLOAT, _I32, _I16))
_COLUMN_BYTES = 2 * TILE


def column_of(builder: ir.IRBuilder, pointer: ir.Value, number: str, at: int = 0) -> ir.Value:
    """Load sixteen weights of type `number`, 'float16' or 'bfloat16', from `pointer` + `at` bytes as float32."""
    if number == "float16":
        return builder.fpext(load(builder, pointer, ir.VectorType(ir.HalfType(), TILE), at), _FLOATS)
    wide = builder.zext(load(builder, pointer, _SHORTS, at), _INTS)
    return builder.bitcast(builder.shl(wide, ir.Constant(_INTS, [16] * TILE)), _FLOATS)


def emit_number_tile(
    builder: ir.IRBuilder, number: str, rows: int, chains: int, weights: ir.Value, x: ir.Value, out: ir.Value,
    out_stride: ir.Value, columns: ir.Value,
) -> None:  # fmt: skip
    """Emit one tile times `rows` rows of activations, x [rows, columns] float32; 16 float32 at out + row * out_stride.

    chains: number of independent partial sums over columns, which hide the latency of additions. Addresses and strides
    are int64, in bytes.
    """
    pointer = ir.IntType(8).as_pointer()
    sums = [
        [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in range(chains)] for _ in range(rows)
    ]
    first = builder.inttoptr(weights, pointer)
    row_bytes = builder.mul(columns, ir.Constant(_I64, 4))
    with cgutils.for_range(builder, builder.udiv(columns, ir.Constant(_I64, chains))) as loop:
        place = builder.gep(first, [builder.mul(loop.index, ir.Constant(_I64, chains * _COLUMN_BYTES))])
        column = builder.add(x, builder.mul(loop.index, ir.Constant(_I64, 4 * chains)))
        prefetch_bytes(builder, place, chains * _COLUMN_BYTES, rows)
        loaded = [column_of(builder, place, number, chain * _COLUMN_BYTES) for chain in range(chains)]
        for row in range(rows):
            at = builder.add(column, builder.mul(row_bytes, ir.Constant(_I64, row)))
            values = builder.inttoptr(at, pointer)
            for chain in range(chains):
                value = splat(builder, load(builder, values, _FLOAT, 4 * chain))
                sum_ = builder.load(sums[row][chain])
                fused = call_intrinsic(builder, f"llvm.fma.v{TILE}f32", _FLOATS, loaded[chain], value, sum_)
                builder.store(fused, sums[row][chain])
    for row in range(rows):
        total = builder.load(sums[row][0])
        for chain in range(1, chains):
            total = builder.fadd(total, builder.load(sums[row][chain]))
        place = builder.inttoptr(builder.add(out, builder.mul(out_stride, ir.Constant(_I64, row))), pointer)
        builder.store(total, builder.bitcast(place, _FLOATS.as_pointer()), align=4)


@intrinsic(prefer_literal=True)
def _number_tile(typingctx, number, rows, chains, weights, x, out, out_stride, columns):
    literals = number.literal_value, rows.literal_value, chains.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        emit_number_tile(builder, *literals, *arguments[3:])
        return context.get_dummy_value()

    return types.none(number, rows, chains, *[types.int64] * 5), codegen


@cache
def number_dots(number: str, rows: int, chains: int, together: int) -> Any:
    """Returns a compiled function, as described in `cpu_ops.weight_dots.dots_address`, for weights of type `number`.

    together: rows of activations whose sums fit into registers; it divides `rows`.
    """
    code_version = CODE_VERSION

    @cfunc(DOTS_SIGNATURE, cache=True, nopython=True)
    def dots(weights, x, x_scales, x_sums, out, out_stride, columns, first_tile, end_tile, taken):
        tile_bytes = columns * (2 * TILE) + 0 * code_version
        for tile in range(first_tile, end_tile):
            for row in range(0, taken, together):
                at, to = x + row * columns * 4, out + row * out_stride + tile * 64
                _number_tile(number, together, chains, weights + tile * tile_bytes, at, to, out_stride, columns)

    return dots


def pack_numbers(numbers: np.ndarray, packed: np.ndarray, threads: int) -> None:
    """Pack 16-bit numbers [rows, columns] uint16 into `packed` uint8; rows that pad the last tile are 0.

    The caller must own `threads.one_kernel_at_a_time`.
    """
    call_region("pack numbers", "", address_of(_number_packer()), (numbers, packed), threads)


@region_arguments("pack numbers")
def _packed(_: str) -> tuple[Any, ...]:
    return types.Array(types.uint16, 2, "C", readonly=True), types.Array(types.uint8, 1, "C")


@cache
def _number_packer() -> Any:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def pack_tiles(thread, threads, arguments):
        numbers, packed = arguments_at("pack numbers", "", arguments)
        rows, columns = numbers.shape
        tiled = packed.view(np.uint16).reshape(-1, columns, TILE)
        tiles = len(tiled)
        for tile in range(tiles * thread // threads, tiles * (thread + 1) // threads):
            for start in range(0, columns, GROUP):
                for lane in range(TILE):
                    row = tile * TILE + lane
                    for k in range(start, start + GROUP):
                        tiled[tile, k, lane] = numbers[row, k] if row < rows else np.uint16(0)
        return np.int64(0 * code_version)

    return pack_tiles


def number_rows(data: np.ndarray, number: str, rows: np.ndarray, columns: int) -> np.ndarray:
    """Returns the rows `rows` [n] of a packed matrix of `columns` columns: [n, columns] float32."""
    bits = data.view(np.uint16).reshape(-1, columns, TILE)[rows // TILE, :, rows % TILE]
    if number == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
