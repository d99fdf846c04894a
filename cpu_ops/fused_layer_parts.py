"""Parts of the kernels of fused decoder layers: norms, the table of a product, and the residual of a token mixer."""

import numpy as np

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.bfloat16_bits import number
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.tile_products import laid_out, lay_out_part
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE

_REASSOCIATED = {"contract", "nsz", "reassoc"}


@device_function(fastmath=_REASSOCIATED)
def normed(x, weight, epsilon, out):
    """Write the RMSNorm of each row, x / sqrt(mean(x^2) + epsilon) * weight, to out."""
    for row in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + epsilon)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * factor * weight[i]


@device_function
def widened(x, out):
    """Write x, float32 or the bits of bfloat16, to out as float32."""
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[row, i] = number(x[row, i])


@device_function
def coded(x, few):
    """Returns the rows of x [rows, columns] as products take them: codes, scales, sums, words.

    The first `few` rows are quantized (`activations.quantize_rows`), the others laid out in words (`tile_products`),
    on a CPU that has tiles.
    """
    rows, columns = x.shape
    codes = np.empty((few, columns), np.int8)
    scales = np.empty((few, columns // GROUP), np.float32)
    sums = np.empty((few, columns // 16), np.int32)
    quantize_rows(x[:few], codes, scales, sums)
    words = laid_out(rows - few, columns)
    for row in range(few, rows):
        lay_out_part(x[row], words, columns // GROUP, row - few, 0)
    return codes, scales, sums, words


@device_function
def products_table(matrices, rows):
    """Returns the table of the region "multiply" (`cpu_ops.quantized_linear`) for matrices that share an input, of
    which `rows` rows are codes."""
    table = np.zeros((len(matrices), 9), np.int64)
    column = 0
    for index in range(len(matrices)):
        for each in range(5):
            table[index, each] = matrices[index, each]
        table[index, 5], table[index, 6] = column, rows
        column += matrices[index, 1] * TILE
    return table


@device_function
def add_mixed(
    run, multiply, mixed, gates, matrix, bias, after_norm, after_epsilon, factor, x, few, per_pass, threads,
):  # fmt: skip
    """Add a token mixer's output to x: `factor` times the norm of the output projection of `mixed`.

    mixed: [rows, columns], the mixer's result, float32 or the bits of bfloat16. gates: [rows, columns] float32, its
    factors; length 0 for none. matrix: [1, 5] int64, `PackedMatrix.call` of the projection. bias: [width]; after_norm:
    [width]; both float32, of length 0 for none. x: [rows, width] float32. few: as for `coded`.
    """
    rows, columns = mixed.shape
    width = x.shape[1]
    numbers = np.empty((rows, columns), np.float32)
    widened(mixed, numbers)
    if gates.size:
        for row in range(rows):
            for i in range(columns):
                numbers[row, i] *= gates[row, i]
    codes, scales, sums, words = coded(numbers, few)
    projected = np.empty((rows, matrix[0, 1] * TILE), np.float32)
    region_args = products_table(matrix, few), numbers, codes, scales, sums, projected, per_pass, words
    run_region("multiply", "", run, multiply, threads, region_args)
    if bias.size:
        for row in range(rows):
            for i in range(width):
                projected[row, i] += bias[i]
    add_normed(projected, after_norm, after_epsilon, factor, x)


@device_function(fastmath=_REASSOCIATED)
def add_normed(added, norm, epsilon, factor, x):
    """Add to x [rows, width] `factor` times the RMSNorm of the first `width` numbers of each row of `added`.

    norm: [width] float32; length 0 for none.
    """
    width = x.shape[1]
    for row in range(x.shape[0]):
        if norm.size:
            total = np.float32(0)
            for i in range(width):
                total += added[row, i] * added[row, i]
            inverse = factor / np.sqrt(total / np.float32(width) + epsilon)
            for i in range(width):
                x[row, i] += added[row, i] * inverse * norm[i]
        else:
            for i in range(width):
                x[row, i] += added[row, i] * factor
