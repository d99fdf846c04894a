"""Products of many rows with packed weights in bfloat16, by AMX tiles, on CPUs that have them.

Some weights are unpacked to bfloat16, into a core's cache and in the order in which tiles take them, and multiplied
with all rows before the next ones. Sums are float32, in an order that the number of rows does not change: a row's
result does not depend on the other rows of the call.

Rows of activations are laid out as words of two bfloat16 numbers, in blocks of `BLOCK` rows, each [columns / BLOCK,
BLOCK rows, TILE]; sums are blocks [`BLOCK`, `BLOCK`].
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.amx_tiles import BLOCK, TILE, begin_tiles, end_tiles, multiplies_by_tiles, multiply_laid_out
from hetero_kv.cpu_ops.bfloat16_bits import round_numbers
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gates import activated
from hetero_kv.cpu_ops.gathered_rows import copy_row
from hetero_kv.cpu_ops.kernel_address import address_of, call_kernel, called_as
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.weight_dots import dot_instruction
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.cpu_ops.weight_numbers import unpack_words

ROWS_AT_ONCE = 512
"""The most rows of a call: with the unpacked weights, their sums stay in a core's L2 cache."""
BLOCKS_AT_ONCE = 8
"""The most blocks of `BLOCK` rows of a matrix in a call."""
# Columns that are unpacked at a time, a multiple of every format's block: a block of their weights stays in a core's L1
# cache while all rows pass.
_COLUMNS = 256
WORDS, SUMS = (types.Array(kind, 1, "C") for kind in (types.uint32, types.float32))


@called_as("tile products")
def _signature(_: str) -> Any:
    integer = types.int64
    return types.int64(integer, integer, integer, WORDS, integer, integer, integer, WORDS, SUMS)


def tile_products_address(name: str) -> int:
    """Returns the address of the kernel "tile products" of format `name`; 0 if this CPU has no tiles.

    int64 (weights, tiles, columns, words, rows, first, count, unpacked, sums): the products of laid-out rows with
    `count` blocks of a matrix of so many tiles of `weight_formats.TILE` rows and so many columns, from block `first`
    on. weights: an address. unpacked, sums: from `unpacking_room` and `room_for_sums`; the block of sums of row block i
    and block first + j is number i * BLOCKS_AT_ONCE + j. Only this kernel has instructions for tiles, for which other
    CPUs have no code.
    """
    return address_of(_kernel(name, dot_instruction())) if multiplies_by_tiles() else 0


@cache
def _kernel(name: str, how: str) -> Any:
    layout = FORMATS[name]
    record, block_columns = layout.record_bytes, layout.columns
    side, lanes, several, width, area = BLOCK, TILE, BLOCKS_AT_ONCE, _COLUMNS, BLOCK * BLOCK
    code_version = CODE_VERSION

    @njit(_signature(""), cache=True, nogil=True, error_model="numpy")
    def products(weights, tiles, columns, words, rows, first, count, unpacked, sums):
        tile_bytes = columns // block_columns * record
        pitch = width // 2 * side
        before = np.empty(64, np.uint8)
        begin_tiles(before)
        for column in range(0, columns, width):
            taken = min(width, columns - column)
            for tile in range(2 * first, min(2 * (first + count), tiles)):
                at = (tile // 2 - first) * pitch + tile % 2 * lanes
                source = weights + tile * tile_bytes + column // block_columns * record
                unpack_words(name, how, source, taken, unpacked, at, side)
            for each in range(count):
                right = each * pitch
                for block in range(-(-rows // side)):
                    left, place = (block * columns + column) * lanes, (block * several + each) * area
                    if column:
                        multiply_laid_out(1, words, left, taken // side, unpacked, right, sums, place)
                    else:
                        multiply_laid_out(0, words, left, taken // side, unpacked, right, sums, place)
        end_tiles(before)
        return 0 * code_version

    return products


@device_function
def laid_out(rows, columns):
    """Returns room for the words of so many rows of so many numbers, a multiple of `BLOCK`."""
    return np.empty(-(-rows // BLOCK) * BLOCK * columns // 2, np.uint32)


@device_function
def lay_out_part(numbers, words, parts, row, first):
    """Write float32 numbers of row `row` to `words`, from part `first` on of its `parts` parts of `BLOCK` numbers."""
    halves = words.view(np.uint16)
    for part in range(numbers.size // BLOCK):
        at = ((row // BLOCK * parts + first + part) * BLOCK + row % BLOCK) * BLOCK
        round_numbers(BLOCK, numbers, part * BLOCK, halves, at)


@device_function
def unpacking_room():
    """Returns a thread's `unpacked`."""
    return scratch(BLOCKS_AT_ONCE * _COLUMNS // 2, BLOCK).view(np.uint32).reshape(-1)


@device_function
def room_for_sums(rows):
    """Returns a thread's `sums` of so many rows."""
    return scratch(-(-rows // BLOCK) * BLOCKS_AT_ONCE * BLOCK, BLOCK).reshape(-1)


@device_function
def multiply_rows_by_tiles(kernel, weights, tiles, columns, words, out, out_column, thread, threads):
    """Write a thread's share of the products of laid-out rows to out [rows, all columns], from `out_column` on.

    kernel: from `tile_products_address`. weights, tiles, columns: of the matrix.
    """
    blocks = (tiles + 1) // 2
    first, end = blocks * thread // threads, blocks * (thread + 1) // threads
    if first == end:
        return
    rows, last = out.shape[0], TILE * tiles
    unpacked, sums = unpacking_room(), room_for_sums(min(rows, ROWS_AT_ONCE))
    for ahead in range(0, rows, ROWS_AT_ONCE):
        taken = min(rows - ahead, ROWS_AT_ONCE)
        part = words[ahead * columns // 2 :]
        for start in range(first, end, BLOCKS_AT_ONCE):
            count = min(BLOCKS_AT_ONCE, end - start)
            arguments = weights, tiles, columns, part, taken, start, count, unpacked, sums
            call_kernel("tile products", "", kernel, arguments)
            for row in range(taken):
                for each in range(count):
                    column = (start + each) * BLOCK
                    place = (row // BLOCK * BLOCKS_AT_ONCE + each) * BLOCK * BLOCK + row % BLOCK * BLOCK
                    if last - column >= BLOCK:
                        target = (ahead + row) * out.shape[1] + out_column + column
                        copy_row(BLOCK, sums.ctypes.data + place * 4, out, target)
                    else:
                        for i in range(last - column):
                            out[ahead + row, out_column + column + i] = sums[place + i]


@device_function(error_model="numpy")
def gate_by_tiles(kind, factor, table, columns, words, rows, gated_words, first, end):
    """Write activation(factor * gate) * up of the laid-out `rows` rows of `columns` numbers to `gated_words`, laid out
    too.

    kind: of the activation (`cpu_ops.gates`). table: of the gate and of the up projection, as for the region
    "multiply". first, end: blocks of `BLOCK` rows of both matrices, whose last tiles are full.
    """
    if first == end:
        return
    halves, parts = gated_words.view(np.uint16), table[0, 1] // 2
    most = min(rows, ROWS_AT_ONCE)
    unpacked, gates, ups = unpacking_room(), room_for_sums(most), room_for_sums(most)
    for ahead in range(0, rows, ROWS_AT_ONCE):
        taken = min(rows - ahead, ROWS_AT_ONCE)
        part = words[ahead * columns // 2 :]
        for start in range(first, end, BLOCKS_AT_ONCE):
            count = min(BLOCKS_AT_ONCE, end - start)
            for index in range(2):
                arguments = (
                    table[index, 0], table[index, 1], columns, part, taken, start, count, unpacked,
                    gates if index == 0 else ups,
                )  # fmt: skip
                call_kernel("tile products", "", table[index, 4], arguments)
            for row in range(taken):
                for each in range(count):
                    place = (row // BLOCK * BLOCKS_AT_ONCE + each) * BLOCK * BLOCK + row % BLOCK * BLOCK
                    block = (ahead + row) // BLOCK * parts + start + each
                    at = (block * BLOCK + row % BLOCK) * BLOCK
                    own, other = gates[place : place + BLOCK], ups[place : place + BLOCK]
                    for i in range(BLOCK):
                        own[i] = activated(own[i] * factor, kind) * other[i]
                    round_numbers(BLOCK, gates, place, halves, at)
