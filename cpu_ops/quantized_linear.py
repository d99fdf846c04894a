"""Products of a few rows of activations with packed quantized weights.

Activations are quantized to int8 in groups of 32, as in llama.cpp, once for all matrices that share them.
`cpu_ops.weight_dots` computes the products. A row's result does not depend on the other rows of the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.tile_products import WORDS, multiply_rows_by_tiles, tile_products_address
from hetero_kv.cpu_ops.weight_blocks import pack
from hetero_kv.cpu_ops.weight_dots import dots_address, rows_per_pass
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE, WeightFormat, format_named

# Bytes of activations, and numbers of a matrix, that passes use in turn: together they stay in a core's L2 cache.
_CACHED = 1 << 17


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix [rows, columns], packed (`cpu_ops.weight_blocks.pack`).

    data: [format.packed_bytes(rows, columns)] uint8.
    """

    data: np.ndarray
    name: str
    rows: int
    columns: int

    @classmethod
    def of_blocks(cls, blocks: np.ndarray, name: str, columns: int, threads: int | None = None) -> "PackedMatrix":
        """Pack GGML's blocks [rows, bytes of a row] of format `name`. Raises the errors of `pack`."""
        return cls(pack(blocks, name, columns, threads), name, len(blocks), columns)

    @property
    def layout(self) -> WeightFormat:
        """The format of the packed data."""
        return format_named(self.name)

    @property
    def tiles(self) -> int:
        """Number of tiles of sixteen rows; the last one is padded."""
        return -(-self.rows // TILE)

    @cached_property
    def call(self) -> tuple[int, int, int, int, int]:
        """(address of the data, number of tiles, addresses of the kernels for one row, for several, and by AMX tiles).

        The last address is 0 on a CPU without tiles.

        The first access compiles the kernels for the instruction set in use, which is then fixed.
        """
        several = dots_address(self.name, rows_per_pass())
        by_tiles = tile_products_address(self.name)
        return self.data.ctypes.data, self.tiles, dots_address(self.name, 1), several, by_tiles


def multiply(x: np.ndarray, matrices: Sequence[PackedMatrix], threads: int | None = None) -> list[np.ndarray]:
    """Returns x @ matrix.T for every matrix.

    x: [rows, columns] float32. matrices: with `columns` columns each. threads: number of threads (None: Numba's
    setting).

    Returns [rows, matrix.rows] float32 for each matrix (views of one array, rows strided).
    Raises ValueError if x and a matrix do not fit together, TypeError if x is not float32.
    """
    return multiply_runs(x, [(0, len(x), matrices)], threads)


def multiply_runs(
    x: np.ndarray, runs: Sequence[tuple[int, int, Sequence[PackedMatrix]]], threads: int | None = None
) -> list[np.ndarray]:
    """Returns x @ matrix.T with different matrices for each run of rows, as tokens have experts, in one call.

    x: [rows, columns] float32. runs: (first row, end row, matrices); consecutive runs cover all rows, matrices have
    `columns` columns, and all runs have matrices with the same numbers of rows. threads: number of threads (None:
    Numba's setting).

    Returns [rows, matrix.rows] float32 for each matrix of a run (views of one array, rows strided).
    Raises ValueError if x, runs and matrices do not fit together, TypeError if x is not float32.
    """
    first = runs[0][2]
    outputs = [matrix.rows for matrix in first]
    if x.ndim != 2 or any(matrix.columns != x.shape[1] for _, _, matrices in runs for matrix in matrices):
        raise ValueError(f"x {x.shape} must be [rows, columns] with columns {[matrix.columns for matrix in first]}")
    if any([matrix.rows for matrix in matrices] != outputs for _, _, matrices in runs):
        raise ValueError(f"matrices of all runs must have {outputs} rows")
    if [start for start, _, _ in runs] + [len(x)] != [0] + [end for _, end, _ in runs]:
        raise ValueError(f"runs {[run[:2] for run in runs]} must follow each other and cover {len(x)} rows")
    if x.dtype != np.float32:
        raise TypeError(f"x is {x.dtype}; pass float32")
    widths = [matrix.tiles * TILE for matrix in first]
    out = np.empty((len(x), sum(widths)), np.float32)
    starts = [0, *accumulate(widths)]
    table = np.array(
        [
            (*matrix.call, column, end, bool(matrix.layout.number), start)
            for start, end, matrices in runs
            for matrix, column in zip(matrices, starts, strict=False)
        ],
        np.int64,
    )
    with kernel_threads(threads) as used:
        addresses = all_threads(), multiply_region()
        _multiplier()(*addresses, np.ascontiguousarray(x), table, out, rows_per_pass(), used)
    return [out[:, column : column + count] for column, count in zip(starts, outputs, strict=False)]


@intrinsic
def call_dots(typingctx, address, weights, x, x_scales, x_sums, out, out_stride, columns, first_tile, end_tile, taken):
    """Call the function at `address` (`cpu_ops.weight_dots.dots_address`)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        # The signature of Numba's C callbacks.
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 10)
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 11), codegen


@device_function
def _multiply_few(weights, several, per_pass, codes, scales, sums, out, out_column, first, end):
    """Compute tiles `first` to `end` for fewer rows than a pass has, padded with rows of zeros.

    The arguments are those of `multiply_tiles`.
    """
    rows, columns = codes.shape
    filled = np.zeros((per_pass, columns), codes.dtype)
    filled_scales = np.zeros(per_pass * (columns // GROUP), np.float32)
    filled_sums = np.zeros(per_pass * (columns // 16), np.int32)
    for row in range(rows):
        for i in range(columns):
            filled[row, i] = codes[row, i]
    flat_scales, flat_sums = scales.reshape(-1), sums.reshape(-1)
    for i in range(rows * (columns // GROUP)):
        filled_scales[i] = flat_scales[i]
    for i in range(rows * (columns // 16)):
        filled_sums[i] = flat_sums[i]
    width = (end - first) * TILE
    results = np.empty((per_pass, width), np.float32)
    call_dots(
        several, weights, filled.ctypes.data, filled_scales.ctypes.data, filled_sums.ctypes.data,
        results.ctypes.data - first * (TILE * 4), width * 4, columns, first, end, per_pass,
    )  # fmt: skip
    for row in range(rows):
        for i in range(width):
            out[row, out_column + first * TILE + i] = results[row, i]


@device_function
def rows_in_cache(columns, per_pass):
    """Returns how many rows of int8 codes pass over all tiles before the next ones: they stay in a core's cache."""
    wide = 2 * per_pass
    return max(wide, _CACHED // columns // wide * wide)


@njit(nogil=True, inline="always")
def multiply_tiles(weights, one, several, per_pass, codes, scales, sums, out, out_column, first, end):
    """Compute tiles `first` to `end` of a matrix for all rows; write out [rows, width] from `out_column` on.

    codes, scales, sums: of the activations (`cpu_ops.activations.quantize_rows`); for unquantized weights, codes are
    the activations themselves. weights, one, several: from `PackedMatrix.call`.
    """
    rows, columns = codes.shape
    stride = out.shape[1] * 4
    wide = 2 * per_pass
    # Up to half a pass of rows is less work row by row.
    of_pass = per_pass if rows <= per_pass else wide
    if of_pass - per_pass // 2 <= rows < of_pass and 2 * rows > per_pass and first < end:
        _multiply_few(weights, several, of_pass, codes, scales, sums, out, out_column, first, end)
        return
    # Some rows at a time pass over all tiles, and all passes of these rows over a few tiles at a time.
    row_block = rows_in_cache(columns * codes.itemsize, per_pass)
    passes_once = rows in (1, per_pass, wide)
    together = end - first if passes_once else max(1, _CACHED // (TILE * columns))
    for start in range(0, rows, row_block):
        stop, chunk = min(start + row_block, rows), first
        while chunk < end:
            chunk_end, row = min(chunk + together, end), start
            while row < stop:
                left = stop - row
                count = wide if left >= wide else per_pass if 2 * left > per_pass else 1
                # The last pass overlaps the one before, and computes the shared rows again with equal bits.
                row = min(row, rows - count)
                call_dots(
                    several if count > 1 else one, weights, codes.ctypes.data + row * codes.strides[0],
                    scales.ctypes.data + row * (columns // GROUP) * 4, sums.ctypes.data + row * (columns // 16) * 4,
                    out.ctypes.data + row * stride + out_column * 4, stride, columns, chunk, chunk_end, count,
                )  # fmt: skip
                row += count
            chunk = chunk_end


@njit(nogil=True, inline="always")
def multiply_part(weights, tiles, one, several, per_pass, codes, scales, sums, out, out_column, part, parts):
    """Compute share `part` of `parts` of a matrix's tiles for all rows; write out [rows, width] from `out_column` on.

    The arguments are those of `multiply_tiles`; tiles: from `PackedMatrix.call`.
    """
    first, end = tiles * part // parts, tiles * (part + 1) // parts
    multiply_tiles(weights, one, several, per_pass, codes, scales, sums, out, out_column, first, end)


_REAL2, _TABLE = types.Array(types.float32, 2, "C"), types.Array(types.int64, 2, "C")


@region_arguments("multiply")
def _multiplied(_: str) -> tuple[Any, ...]:
    """(table, x, codes, scales, sums, out, per_pass, words): `table` has one row per matrix and run of rows:
    `PackedMatrix.call`, the first column in out, the end row of x, whether the weights are unquantized numbers, and the
    first row. words: the rows behind those of `codes`, as for `tile_products`; empty if there are none."""
    return (
        _TABLE, _REAL2, types.Array(types.int8, 2, "C"), _REAL2, types.Array(types.int32, 2, "C"), _REAL2, types.int64,
        WORDS,
    )  # fmt: skip


@cache
def multiply_region() -> int:
    """Returns the address of the region "multiply"."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def multiply(thread, threads, arguments):
        table, x, codes, scales, sums, out, per_pass, words = arguments_at("multiply", "", arguments)
        few = codes.shape[0]
        for index in range(table.shape[0]):
            weights, tiles, one, several, by_tiles, column, end, numbers, first = table[index]
            row_scales, row_sums, rows_out = scales[first:end], sums[first:end], out[first:end]
            if numbers:
                multiply_part(
                    weights, tiles, one, several, per_pass, x[first:end], row_scales, row_sums, rows_out, column,
                    thread, threads,
                )  # fmt: skip
            else:
                multiply_part(
                    weights, tiles, one, several, per_pass, codes[first:end], row_scales, row_sums, rows_out, column,
                    thread, threads,
                )  # fmt: skip
            if words.size:
                multiply_rows_by_tiles(
                    by_tiles, weights, tiles, codes.shape[1], words, out[few:], column, thread, threads
                )
        return np.int64(0 * code_version)

    return address_of(multiply)


@cache
def _multiplier() -> Any:
    code_version = CODE_VERSION

    integer = types.int64

    @njit(types.void(integer, integer, _REAL2, _TABLE, _REAL2, integer, integer), cache=True, nogil=True)
    def multiply_all(run, region, x, table, out, per_pass, threads):
        rows, columns = x.shape
        codes = np.empty((rows, columns), np.int8)
        scales = np.empty((rows, columns // GROUP), np.float32)
        sums = np.empty((rows, columns // 16 + 0 * code_version), np.int32)
        if not table[:, 7].all():
            quantize_rows(x, codes, scales, sums)
        no_words = np.empty(0, np.uint32)
        run_region("multiply", "", run, region, threads, (table, x, codes, scales, sums, out, per_pass, no_words))

    return multiply_all
