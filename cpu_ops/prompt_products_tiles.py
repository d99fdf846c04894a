"""Products of a prompt's rows with a packed matrix in bfloat16, by AMX tiles, from and to the model's bfloat16.

As `prompt_products`, with numbers instead of codes: weights of any format are rounded to bfloat16, and a sum once.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.amx_tiles import BLOCK, TILE
from hetero_kv.cpu_ops.bfloat16_bits import float_to_bfloat16, round_numbers
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.gathered_rows import copy_row
from hetero_kv.cpu_ops.kernel_address import address_of, call_kernel
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.tile_products import (
    BLOCKS_AT_ONCE,
    ROWS_AT_ONCE,
    WORDS,
    laid_out,
    room_for_sums,
    tile_products_address,
    unpacking_room,
)

_BITS = types.Array(types.uint16, 2, "C")


def multiply_prompt_by_tiles(x: np.ndarray, matrix: PackedMatrix, out: np.ndarray, threads: int | None = None) -> None:
    """Write x @ matrix.T to out, rounded once.

    x: [rows, columns], the bits of bfloat16 (uint16), C-contiguous. matrix: of any format, with `columns` columns. out:
    [rows, matrix.rows], of x's dtype, C-contiguous. threads: number of threads (None: Numba's setting).

    Raises ValueError if the arrays do not fit together, TypeError for other dtypes, NotImplementedError on a CPU
    without tiles.
    """
    if x.ndim != 2 or x.shape[1] != matrix.columns or out.shape != (len(x), matrix.rows):
        raise ValueError(
            f"x {x.shape} and out {out.shape} do not fit a {matrix.name} [{matrix.rows}, {matrix.columns}]"
        )
    if x.dtype != np.uint16 or out.dtype != np.uint16:
        raise TypeError(f"x is {x.dtype} and out {out.dtype}; both must be uint16, the bits of bfloat16")
    kernel = tile_products_address(matrix.name)
    if not kernel:
        raise NotImplementedError("this CPU, or its system, has no AMX tiles of bfloat16; use `multiply_prompt`")
    with kernel_threads(threads) as used:
        _multiplier()(
            all_threads(), _layout_region(), _product_region(), x, matrix.data.ctypes.data, matrix.tiles, kernel, out,
            used,
        )  # fmt: skip


@region_arguments("prompt rows")
def _row_arguments(_: str) -> tuple[Any, ...]:
    """(x, words): x is laid out in words, as for `tile_products`."""
    return _BITS, WORDS


@region_arguments("prompt tiles")
def _product_arguments(_: str) -> tuple[Any, ...]:
    """(address of the weights, tiles, address of the kernel, columns, words, out)."""
    return *[types.int64] * 4, WORDS, _BITS


@cache
def _layout_region() -> int:
    side, lanes, code_version = BLOCK, TILE, CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def lay_out(thread, threads, arguments):
        x, words = arguments_at("prompt rows", "", arguments)
        rows, columns = x.shape
        deep = columns // side
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            source = x[row].ctypes.data
            for part in range(deep):
                at = ((row // side * deep + part) * side + row % side) * lanes
                copy_row(lanes, source + part * (2 * side), words, at)
        return np.int64(0 * code_version)

    return address_of(lay_out)


@cache
def _product_region() -> int:
    side, several, area = BLOCK, BLOCKS_AT_ONCE, BLOCK * BLOCK
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def products(thread, threads, arguments):
        weights, tiles, kernel, columns, words, out = arguments_at("prompt tiles", "", arguments)
        rows, blocks = len(out), (tiles + 1) // 2
        first, end = blocks * thread // threads, blocks * (thread + 1) // threads
        unpacked, sums = unpacking_room(), room_for_sums(rows)
        for start in range(first, end, several):
            count = min(several, end - start)
            call_kernel(
                "tile products", "", kernel, (weights, tiles, columns, words, rows, start, count, unpacked, sums)
            )
            for row in range(rows):
                for each in range(count):
                    ahead = (start + each) * side
                    many = min(side, out.shape[1] - ahead)
                    place = (row // side * several + each) * area + row % side * side
                    if many == side:
                        round_numbers(side, sums, place, out, row * out.shape[1] + ahead)
                    else:
                        for i in range(many):
                            out[row, ahead + i] = float_to_bfloat16(sums[place + i])
        return np.int64(0 * code_version)

    return address_of(products)


@cache
def _multiplier() -> Any:
    code_version, most = CODE_VERSION, ROWS_AT_ONCE
    integer = types.int64
    signature = types.void(*[integer] * 3, _BITS, *[integer] * 3, _BITS, integer)

    @njit(signature, cache=True, nogil=True)
    def multiply(run, lay_out, products, x, weights, tiles, kernel, out, threads):
        rows, columns = x.shape
        words = laid_out(min(rows, most) + 0 * code_version, columns)
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            run_region("prompt rows", "", run, lay_out, threads, (x[start:stop], words))
            region_args = weights, tiles, kernel, columns, words, out[start:stop]
            run_region("prompt tiles", "", run, products, threads, region_args)

    return multiply
