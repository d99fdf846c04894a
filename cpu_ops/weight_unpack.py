"""Unpacks packed weights to numbers: whole tiles for products with many rows, single rows for embeddings."""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.half_precision_weights import number_rows
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.weight_dots import dot_instruction
from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE, VECTORS, scales_of_bytes
from hetero_kv.cpu_ops.weight_numbers import unpack_tile

_NUMBERS = {np.dtype(np.float32): "float32", np.dtype(np.uint16): "bfloat16", np.dtype(np.float16): "float16"}


def unpack_tiles(matrix: PackedMatrix, out: np.ndarray, first_tile: int = 0, threads: int | None = None) -> None:
    """Unpack rows of a packed matrix, transposed, from `first_tile` on: out[k, r] = matrix[16 * first_tile + r, k].

    out: [columns, rows] float32, float16, or uint16 for the bits of bfloat16 (rounded to nearest even), rows a multiple
    of 16; rows of the last tile beyond the matrix are 0. Float32 numbers are bitwise equal to GGML's.

    Raises ValueError if out does not fit the matrix, TypeError for another dtype.
    """
    number = _NUMBERS.get(out.dtype)
    if number is None:
        raise TypeError(f"out is {out.dtype}; pass float32, float16, or uint16 for bfloat16")
    tiles = out.shape[1] // TILE
    fits = out.shape[0] == matrix.columns and out.shape[1] % TILE == 0 and first_tile + tiles <= matrix.tiles
    if not fits or not out.flags.c_contiguous:
        raise ValueError(f"out {out.shape} from tile {first_tile} on does not fit [{matrix.rows}, {matrix.columns}]")
    with kernel_threads(threads) as used:
        unpack = address_of(_unpacker(matrix.name, number, dot_instruction()))
        region_args = matrix.data.ctypes.data, out.ctypes.data, first_tile, tiles, matrix.columns
        call_region("unpack tiles", "", unpack, region_args, used)


@region_arguments("unpack tiles")
def _unpacked(_: str) -> tuple[Any, ...]:
    """(weights, out, first_tile, tiles, columns); weights and out are addresses."""
    return (types.int64,) * 5


@region_arguments("read rows")
def _read(_: str) -> tuple[Any, ...]:
    """(packed data, rows, out)."""
    return types.Array(types.uint8, 1, "C"), types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C")


@cache
def _unpacker(name: str, number: str, how: str) -> Any:
    layout = FORMATS[name]
    record, block_columns = layout.record_bytes, layout.columns
    size = 4 if number == "float32" else 2
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def unpack(thread, threads, arguments):
        weights, out, first_tile, tiles, columns = arguments_at("unpack tiles", "", arguments)
        tile_bytes = columns // block_columns * record
        stride = tiles * TILE * size
        for tile in range(tiles * thread // threads, tiles * (thread + 1) // threads):
            source = weights + (first_tile + tile) * tile_bytes
            unpack_tile(name, number, how, source, out + tile * TILE * size, stride, columns)
        return np.int64(0 * code_version)

    return unpack


def read_rows(matrix: PackedMatrix, rows: np.ndarray, threads: int | None = None) -> np.ndarray:
    """Returns some rows of a packed matrix as numbers.

    rows: [n] int64. Returns [n, columns] float32, bitwise equal to GGML's numbers.
    Raises IndexError for a row outside the matrix.
    """
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < matrix.rows:
        raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of a matrix that has {matrix.rows}")
    if number := matrix.layout.number:
        return number_rows(matrix.data, number, rows, matrix.columns)
    out = np.empty((len(rows), matrix.columns), np.float32)
    if matrix.layout.codebook:
        # Few models have such embeddings, so that no kernel reads single rows: this unpacks their whole tiles.
        tile = np.empty((matrix.columns, TILE), np.float32)
        for row, numbers in zip(rows, out, strict=True):
            unpack_tiles(matrix, tile, int(row) // TILE, threads)
            numbers[:] = tile[:, row % TILE]
        return out
    with kernel_threads(threads) as used:
        region_args = matrix.data, np.ascontiguousarray(rows, np.int64), out
        call_region("read rows", "", address_of(_row_reader(matrix.name)), region_args, used)
    return out


@intrinsic
def _half_to_float(typingctx, bits):
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@njit(inline="always")
def _half(data, at):
    return _half_to_float(np.uint16(data[at]) | (np.uint16(data[at + 1]) << np.uint16(8)))


@cache
def _row_reader(name: str) -> Any:
    layout = FORMATS[name]
    record, head, groups, group_bytes = layout.record_bytes, layout.head_bytes, layout.groups, layout.group_bytes
    block_columns, scale_bytes, low_bytes = layout.columns, layout.scale_bytes, layout.low_bytes
    low_bits, high_bits, parts, zero = layout.low_bits, layout.high_bits, layout.parts, layout.zero
    two_levels, has_minimum, signed_scales = layout.two_levels, layout.has_minimum, layout.signed_scales
    of_bytes, in_bytes = scales_of_bytes(layout.bytes_as), bool(layout.bytes_as)
    has_integers, signed = layout.scales > 0, layout.low_bits == 8
    table, has_table = np.array(layout.table or range(16), np.float32), bool(layout.table)
    low_step, high_step = VECTORS * low_bits // 8, max(high_bits, 1)
    low_mask, high_mask = 2**low_bits - 1, 2**high_bits - 1
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def read(thread, threads, arguments):
        data, rows, out = arguments_at("read rows", "", arguments)
        columns = out.shape[1]
        blocks = columns // block_columns
        for n in range(len(rows) * thread // threads, len(rows) * (thread + 1) // threads):
            tile, lane = rows[n] // TILE, rows[n] % TILE
            for group in range(columns // GROUP):
                start = (tile * blocks + group // groups) * record
                at = start + head + group % groups * group_bytes
                for k in range(GROUP):
                    vector, byte = k // 4, lane * 4 + k % 4
                    code = data[at + scale_bytes + vector % low_step * 64 + byte]
                    code = (code >> (low_bits * (vector // low_step))) & low_mask
                    if high_bits:
                        high = data[at + scale_bytes + low_bytes + vector % high_step * 64 + byte]
                        code |= ((high >> (high_bits * (vector // high_step))) & high_mask) << low_bits
                    number = np.float32(np.int8(code)) if signed else np.float32(np.int64(code) - zero)
                    if has_table:
                        number = table[code]
                    part = k * parts // GROUP
                    minimum = np.float32(0)
                    if two_levels and has_integers:
                        integer = data[at + part * TILE + lane]
                        factor = np.float32(np.int8(integer)) if signed_scales else np.float32(integer)
                        scale = _half(data, start + 2 * lane) * factor
                        if has_minimum:
                            integer = data[at + (parts + part) * TILE + lane]
                            minimum = -_half(data, start + 2 * TILE + 2 * lane) * np.float32(integer)
                    elif in_bytes:
                        scale = of_bytes[data[at + part * TILE + lane]]
                    else:
                        scale = _half(data, (start if two_levels else at) + 2 * lane)
                        if has_minimum:
                            minimum = _half(data, at + 2 * TILE + 2 * lane)
                    out[n, group * GROUP + k] = scale * number + minimum
        return np.int64(0 * code_version)

    return read
