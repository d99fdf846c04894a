"""Packs blocks of formats with a codebook into tiles; one kernel moves the bits of every format."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.weight_formats import FORMATS, TILE


def pack_codebook_blocks(blocks: np.ndarray, name: str, row_blocks: int, packed: np.ndarray, threads: int) -> None:
    """Pack a matrix of a format with a codebook.

    blocks: [rows, bytes of a row] uint8, contiguous. row_blocks: blocks of a row. packed: the matrix's bytes, uint8.
    """
    call_region("move bits", "", address_of(_mover()), (blocks, row_blocks, _moves(name), packed), threads)


@cache
def _moves(name: str) -> np.ndarray:
    """Which bits of a block go where: [moves, 6] int64.

    A move has the byte in a row's block, the bits to shift it to the right, a mask, the bits to shift it to the left,
    the byte in a tile's block for the first row, and the bytes from row to row there.
    """
    layout = FORMATS[name]
    codebook = layout.codebook
    assert codebook is not None
    moves = []
    for group in range(layout.groups):
        plane_start = layout.head_bytes + group * layout.group_bytes
        for number, (size, first, step) in enumerate(codebook.planes):
            if first >= 0:
                start = first + step * group
                moves += [(start + byte, 0, 255, 0, plane_start + byte, size) for byte in range(size)]
            moves += [
                (byte, bit, 2**bits - 1, to, plane_start, size)
                for byte, bit, bits, plane, of_group, to in codebook.moved
                if (plane, of_group) == (number, group)
            ]
            plane_start += size * TILE
    scale = [move for move in codebook.moved if move[3] < 0]
    moves += [(byte, bit, 2**bits - 1, to % 8, to // 8, 2) for byte, bit, bits, _, _, to in scale]
    return np.array(moves if scale else [*moves, (0, 0, 255, 0, 0, 2), (1, 0, 255, 0, 1, 2)], np.int64)


@region_arguments("move bits")
def _moved(_: str) -> tuple[Any, ...]:
    """(blocks [rows, bytes], blocks of a row, moves, packed)."""
    return (
        types.Array(types.uint8, 2, "C", readonly=True), types.int64, types.Array(types.int64, 2, "C"),
        types.Array(types.uint8, 1, "C"),
    )  # fmt: skip


@cache
def _mover() -> Any:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def move_bits(thread, threads, arguments):
        blocks, row_blocks, moves, packed = arguments_at("move bits", "", arguments)
        rows, block_bytes = blocks.shape[0], blocks.shape[1] // row_blocks
        tiles = (rows + TILE - 1) // TILE
        record = len(packed) // (tiles * row_blocks)
        for tile in range(tiles * thread // threads, tiles * (thread + 1) // threads):
            for index in range(row_blocks):
                start = (tile * row_blocks + index) * record
                packed[start : start + record] = 0
                for move in range(len(moves)):
                    source, right, mask, left, place, step = moves[move]
                    source += index * block_bytes
                    place += start
                    for lane in range(min(TILE, rows - tile * TILE)):
                        bits = (np.int64(blocks[tile * TILE + lane, source]) >> right) & mask
                        packed[place + lane * step] |= np.uint8(bits << left)
        return np.int64(0 * code_version)

    return move_bits
