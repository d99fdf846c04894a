"""Products of a prompt's rows with a packed matrix, by int8 codes, from and to the model's dtype.

All threads quantize some rows, then each multiplies them with some tiles after others, while the codes are in a cache:
a core that another program disturbs, or a slower one, takes fewer. Nothing of the prompt's size is written besides the
products. A row's result is that of `quantized_linear.multiply`, rounded.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.atomics import add_atomic
from hetero_kv.cpu_ops.bfloat16_bits import NUMBERS, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.fused_layer_parts import widened
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, all_threads, arguments_at, region_arguments, run_region
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix, multiply_tiles, rows_in_cache
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

# Rows whose codes are in memory at a time.
_ROWS_AT_ONCE = 256
# Shares of the tiles for each thread.
_SHARES = 8
_REAL1 = types.Array(types.float32, 1, "C")
_REAL2, _CODES2, _SUMS2 = (types.Array(kind, 2, "C") for kind in (types.float32, types.int8, types.int32))


def multiply_prompt(
    x: np.ndarray, matrix: PackedMatrix, out: np.ndarray, bias: np.ndarray | None = None, threads: int | None = None
) -> None:
    """Write x @ matrix.T + bias to out, rounded once.

    x: [rows, columns], float32 or the bits of bfloat16 (uint16), C-contiguous. matrix: of quantized weights, with
    `columns` columns. out: [rows, matrix.rows], of x's dtype, C-contiguous. bias: [matrix.rows] float32; None for none.
    threads: number of threads (None: Numba's setting).

    Raises ValueError if the arrays do not fit together, TypeError for other dtypes.
    """
    if x.ndim != 2 or x.shape[1] != matrix.columns or out.shape != (len(x), matrix.rows) or matrix.layout.number:
        raise ValueError(
            f"x {x.shape} and out {out.shape} do not fit a {matrix.name} [{matrix.rows}, {matrix.columns}]"
        )
    added = np.zeros(0, np.float32) if bias is None else np.ascontiguousarray(bias)
    if bias is not None and (added.shape != (matrix.rows,) or added.dtype != np.float32):
        raise ValueError(f"bias {added.shape} of {added.dtype} must be [{matrix.rows}] float32")
    if x.dtype.name not in NUMBERS or out.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype} and out {out.dtype}; both must be one of {', '.join(NUMBERS)}")
    dtype = x.dtype.name
    regions = all_threads(), _quantize_region(dtype), _product_region(dtype)
    with kernel_threads(threads) as used:
        _multiplier(dtype)(*regions, x, *matrix.call[:4], added, out, rows_per_pass(), used)


@region_arguments("prompt codes")
def _code_arguments(dtype: str) -> tuple[Any, ...]:
    """(x, codes, scales, sums), as for `activations.quantize_rows`."""
    return types.Array(NUMBERS[dtype], 2, "C"), _CODES2, _REAL2, _SUMS2


@region_arguments("prompt products")
def _product_arguments(dtype: str) -> tuple[Any, ...]:
    """(address of the weights, tiles, addresses of the kernels for one row and for several, rows of a pass, number of
    shares taken so far [1], codes, scales, sums, bias, out); bias is empty for none."""
    integer, out = types.int64, types.Array(NUMBERS[dtype], 2, "C")
    return *[integer] * 5, types.Array(integer, 1, "C"), _CODES2, _REAL2, _SUMS2, _REAL1, out


@cache
def _quantize_region(dtype: str) -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def quantize(thread, threads, arguments):
        x, codes, scales, sums = arguments_at("prompt codes", dtype, arguments)
        rows, columns = x.shape
        numbers = np.empty((1, columns), np.float32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            widened(x[row : row + 1], numbers)
            quantize_rows(numbers, codes[row : row + 1], scales[row : row + 1], sums[row : row + 1])
        return np.int64(0 * code_version)

    return address_of(quantize)


@cache
def _product_region(dtype: str) -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def products(thread, threads, arguments):
        weights, tiles, one, several, per_pass, taken, codes, scales, sums, bias, out = arguments_at(
            "prompt products", dtype, arguments
        )
        rows, columns = codes.shape
        share = max(1, tiles // (_SHARES * threads))
        together = rows_in_cache(columns, per_pass)
        results = np.empty((together, share * TILE), np.float32)
        first = (add_atomic(taken.ctypes.data, 1) - 1) * share
        while first < tiles:
            end, ahead = min(first + share, tiles), first * TILE
            count = min(end * TILE, out.shape[1]) - ahead
            for start in range(0, rows, together):
                stop = min(start + together, rows)
                multiply_tiles(
                    weights, one, several, per_pass, codes[start:stop], scales[start:stop], sums[start:stop],
                    results[: stop - start], -ahead, first, end,
                )  # fmt: skip
                for row in range(start, stop):
                    numbers, target = results[row - start], out[row, ahead : ahead + count]
                    if bias.size:
                        for i in range(count):
                            numbers[i] += bias[ahead + i]
                    for i in range(count):
                        target[i] = rounded(out, numbers[i])
            first = (add_atomic(taken.ctypes.data, 1) - 1) * share
        return np.int64(0 * code_version)

    return address_of(products)


@cache
def _multiplier(dtype: str) -> Any:
    code_version = CODE_VERSION
    integer, numbers_type = types.int64, types.Array(NUMBERS[dtype], 2, "C")
    signature = types.void(*[integer] * 3, numbers_type, *[integer] * 4, _REAL1, numbers_type, integer, integer)

    @njit(signature, cache=True, nogil=True)
    def multiply(run, quantize, products, x, weights, tiles, one, several, bias, out, per_pass, threads):
        rows, columns = x.shape
        most = min(rows, _ROWS_AT_ONCE + 0 * code_version)
        all_codes = np.empty((most, columns), np.int8)
        all_scales = np.empty((most, columns // GROUP), np.float32)
        all_sums = np.empty((most, columns // 16), np.int32)
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            codes, scales, sums = all_codes[: stop - start], all_scales[: stop - start], all_sums[: stop - start]
            run_region("prompt codes", dtype, run, quantize, threads, (x[start:stop], codes, scales, sums))
            taken = np.zeros(1, np.int64)
            region_args = weights, tiles, one, several, per_pass, taken, codes, scales, sums, bias, out[start:stop]
            run_region("prompt products", dtype, run, products, threads, region_args)

    return multiply
