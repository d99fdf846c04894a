"""Packs the blocks of GGML's quantized formats in tiles (`cpu_ops.weight_formats`)."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from hetero_kv.cpu_ops.block_readers import BLOCK_READERS
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.codebook_blocks import pack_codebook_blocks
from hetero_kv.cpu_ops.half_precision_weights import pack_numbers
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.weight_arena import WEIGHTS
from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE, VECTORS, WeightFormat


def pack(blocks: np.ndarray, name: str, columns: int, threads: int | None = None) -> np.ndarray:
    """Pack a quantized matrix in tiles.

    blocks: [rows, bytes of a row] uint8, GGML's blocks of format `name` as in a file. columns: of the matrix. threads:
    number of threads (None: Numba's setting).

    Returns the packed bytes [format_named(name).packed_bytes(rows, columns)] uint8; rows that pad the last tile are 0.
    Raises ValueError for an unknown format, or for blocks that do not fit the number of columns.
    """
    layout = FORMATS.get(name)
    if layout is None:
        raise ValueError(f"weight format {name!r} is not one of {', '.join(FORMATS)}")
    if (
        columns % layout.columns
        or blocks.ndim != 2
        or blocks.shape[1] != columns // layout.columns * layout.block_bytes
    ):
        raise ValueError(
            f"blocks {blocks.shape} are not rows of {columns} columns in {name}, whose blocks hold {layout.columns} "
            f"columns in {layout.block_bytes} bytes"
        )
    packed = WEIGHTS.empty(layout.packed_bytes(len(blocks), columns))
    with kernel_threads(threads) as used:
        if layout.number:
            pack_numbers(np.ascontiguousarray(blocks).view(np.uint16), packed, used)
        elif layout.codebook:
            row_blocks = columns // layout.columns
            pack_codebook_blocks(np.ascontiguousarray(blocks), name, row_blocks, packed, used)
        else:
            region_args = np.ascontiguousarray(blocks), columns // layout.columns, packed
            call_region("pack tiles", "", address_of(_packer(name)), region_args, used)
    return packed


@region_arguments("pack tiles")
def _packed(_: str) -> tuple[Any, ...]:
    """(blocks [rows, bytes], blocks of a row, packed)."""
    return types.Array(types.uint8, 2, "C", readonly=True), types.int64, types.Array(types.uint8, 1, "C")


@njit(inline="always")
def _put_half(packed, at, bits):
    packed[at] = bits & 255
    packed[at + 1] = bits >> 8


def _read(name, block, codes, scales, minimums):
    """Call the reader of a format by its name: a kernel that closed over the function itself would get a new key in
    Numba's disk cache in every process."""
    raise NotImplementedError("for kernels alone")


@overload(_read, prefer_literal=True)
def _reader(name, block, codes, scales, minimums):
    reader = BLOCK_READERS[name.literal_value]
    return lambda name, block, codes, scales, minimums: reader(block, codes, scales, minimums)


@cache
def _packer(name: str) -> Any:
    layout: WeightFormat = FORMATS[name]
    block_bytes, record, head = layout.block_bytes, layout.record_bytes, layout.head_bytes
    groups, group_bytes, scale_bytes, low_bytes = (
        layout.groups,
        layout.group_bytes,
        layout.scale_bytes,
        layout.low_bytes,
    )
    low_bits, high_bits, per_group = layout.low_bits, layout.high_bits, layout.scales
    two_levels, has_minimum, in_bytes = layout.two_levels, layout.has_minimum, bool(layout.bytes_as)
    # Vectors whose codes share a byte of the low plane and of the high plane.
    low_share, high_share = 8 // low_bits, VECTORS // max(high_bits, 1)
    low_step, high_step = VECTORS // low_share, VECTORS // high_share
    # The same mask for each of the four codes of a word.
    low_mask, high_mask = (np.uint32((2**bits - 1) * 0x01010101) for bits in (low_bits, high_bits))
    high_shift = np.uint32(low_bits)
    record_words, head_words, group_words = record // 4, head // 4, group_bytes // 4
    scale_words, high_words = scale_bytes // 4, (scale_bytes + low_bytes) // 4
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def pack_tiles(thread, threads, arguments):
        blocks, row_blocks, packed = arguments_at("pack tiles", "", arguments)
        rows = blocks.shape[0]
        tiles = (rows + TILE - 1) // TILE
        packed_words = packed.view(np.uint32)
        # Of a row that pads a tile they stay zero.
        codes = np.zeros((TILE, groups * GROUP), np.uint8)
        code_words = codes.view(np.uint32)
        scales = np.zeros(16, np.uint8)
        minimums = np.zeros(16, np.uint8)
        for tile in range(tiles * thread // threads, tiles * (thread + 1) // threads):
            lanes = min(TILE, rows - tile * TILE)
            codes[lanes:] = 0
            for index in range(row_blocks):
                start = (tile * row_blocks + index) * record
                if lanes < TILE:
                    packed[start : start + record] = 0
                for lane in range(lanes):
                    block = blocks[tile * TILE + lane, index * block_bytes : (index + 1) * block_bytes]
                    scale, minimum = _read(name, block, codes[lane], scales, minimums)
                    first = start if two_levels else start + head
                    if not in_bytes:
                        _put_half(packed, first + 2 * lane, scale)
                    if has_minimum:
                        _put_half(packed, first + 2 * TILE + 2 * lane, minimum)
                    if two_levels or in_bytes:
                        for part in range(groups * per_group):
                            at = start + head + part // per_group * group_bytes + part % per_group * TILE + lane
                            packed[at] = scales[part]
                            if has_minimum:
                                packed[at + per_group * TILE] = minimums[part]
                first_word = (tile * row_blocks + index) * record_words + head_words
                for group in range(groups):
                    at = first_word + group * group_words + scale_words
                    for lane in range(TILE):
                        for vector in range(low_step):
                            word = np.uint32(0)
                            for share in range(low_share):
                                part = code_words[lane, group * VECTORS + share * low_step + vector] & low_mask
                                word |= part << np.uint32(low_bits * share)
                            packed_words[at + vector * TILE + lane] = word
                    at = first_word + group * group_words + high_words
                    for lane in range(TILE if high_bits else 0):
                        for vector in range(high_step):
                            word = np.uint32(0)
                            for share in range(high_share):
                                part = code_words[lane, group * VECTORS + share * high_step + vector] >> high_shift
                                word |= (part & high_mask) << np.uint32(high_bits * share)
                            packed_words[at + vector * TILE + lane] = word
        return np.int64(0 * code_version)

    return pack_tiles
