"""Reads the blocks of GGML's quantized formats and packs them in tiles (`cpu_ops.weight_formats`).

A reader takes the bytes of one block of a row. It writes the unsigned codes of the block's columns (Q8_0: the bytes of
the signed codes), and the scales and minimums that are bytes. It returns the bits of the block's
float16 scale and minimum.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.codebook_blocks import pack_codebook_blocks
from hetero_kv.cpu_ops.half_precision_weights import pack_numbers
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.weight_arena import WEIGHTS
from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE, VECTORS, WeightFormat

_READERS: dict[str, Any] = {}


def _reads(name: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _READERS[name] = njit(function, inline="always")
        return function

    return register


@njit(inline="always")
def _half(block, at):
    return np.uint16(block[at]) | (np.uint16(block[at + 1]) << np.uint16(8))


@njit(inline="always")
def _nibbles(block, at, codes):
    for i in range(16):
        codes[i] = block[at + i] & 15
        codes[i + 16] = block[at + i] >> 4


@njit(inline="always")
def _fifth_bits(block, at, codes):
    words = codes.view(np.uint32)
    for i in range(8):
        # The product copies four bits into the lowest bits of four bytes.
        bits = np.uint32((block[at + i // 2] >> (i % 2 * 4)) & 15)
        words[i] |= ((bits * np.uint32(0x204081)) & np.uint32(0x01010101)) << np.uint32(4)


@njit(inline="always")
def _two_bits(block, at, codes):
    for half in range(2):
        for part in range(4):
            for i in range(32):
                codes[half * 128 + part * 32 + i] = (block[at + half * 32 + i] >> (2 * part)) & 3


@njit(inline="always")
def _four_bits(block, at, codes):
    for pair in range(4):
        for half in range(2):
            for i in range(32):
                codes[pair * 64 + half * 32 + i] = (block[at + pair * 32 + i] >> (half * 4)) & 15


@_reads("Q4_0")
@_reads("IQ4_NL")
def _q4_0(block, codes, scales, minimums):
    _nibbles(block, 2, codes)
    return _half(block, 0), np.uint16(0)


@_reads("MXFP4")
def _mxfp4(block, codes, scales, minimums):
    _nibbles(block, 1, codes)
    scales[0] = block[0]
    return np.uint16(0), np.uint16(0)


@_reads("NVFP4")
def _nvfp4(block, codes, scales, minimums):
    for i in range(4):
        scales[i] = block[i]
    for i in range(64):
        codes[i] = (block[4 + i // 16 * 8 + i % 8] >> (i // 8 % 2 * 4)) & 15
    return np.uint16(0), np.uint16(0)


@_reads("Q1_0")
def _q1_0(block, codes, scales, minimums):
    for i in range(128):
        codes[i] = (block[2 + i // 8] >> (i % 8)) & 1
    return _half(block, 0), np.uint16(0)


@_reads("TQ2_0")
def _tq2_0(block, codes, scales, minimums):
    _two_bits(block, 0, codes)
    return _half(block, 64), np.uint16(0)


@njit(inline="always")
def _digits(block, at, stride, count, codes, to):
    """Five (or fewer: `count`) base-3 digits of each of `stride` bytes, as fractions of 256."""
    power = 1
    for digit in range(count):
        for i in range(stride):
            codes[to + digit * stride + i] = ((np.int64(block[at + i]) * power & 255) * 3) >> 8
        power *= 3


@_reads("TQ1_0")
def _tq1_0(block, codes, scales, minimums):
    _digits(block, 0, 32, 5, codes, 0)
    _digits(block, 32, 16, 5, codes, 160)
    _digits(block, 48, 4, 4, codes, 240)
    return _half(block, 52), np.uint16(0)


@_reads("Q4_1")
def _q4_1(block, codes, scales, minimums):
    _nibbles(block, 4, codes)
    return _half(block, 0), _half(block, 2)


@_reads("Q5_0")
def _q5_0(block, codes, scales, minimums):
    _nibbles(block, 6, codes)
    _fifth_bits(block, 2, codes)
    return _half(block, 0), np.uint16(0)


@_reads("Q5_1")
def _q5_1(block, codes, scales, minimums):
    _nibbles(block, 8, codes)
    _fifth_bits(block, 4, codes)
    return _half(block, 0), _half(block, 2)


@_reads("Q8_0")
def _q8_0(block, codes, scales, minimums):
    for i in range(32):
        codes[i] = block[2 + i]
    return _half(block, 0), np.uint16(0)


@_reads("IQ4_XS")
def _iq4_xs(block, codes, scales, minimums):
    for i in range(8):
        low = (block[4 + i // 2] >> (i % 2 * 4)) & 15
        high = (block[2 + i // 4] >> (i % 4 * 2)) & 3
        scales[i] = np.uint8((low | (high << 4)) - 32)
    for group in range(8):
        for i in range(16):
            pair = block[8 + group * 16 + i]
            codes[group * 32 + i] = pair & 15
            codes[group * 32 + 16 + i] = pair >> 4
    return _half(block, 0), np.uint16(0)


@_reads("Q2_K")
def _q2_k(block, codes, scales, minimums):
    for i in range(16):
        scales[i] = block[i] & 15
        minimums[i] = block[i] >> 4
    _two_bits(block, 16, codes)
    return _half(block, 80), _half(block, 82)


@_reads("Q3_K")
def _q3_k(block, codes, scales, minimums):
    for i in range(16):
        low = (block[96 + i % 8] >> (i // 8 * 4)) & 15
        high = (block[104 + i % 4] >> (i // 4 * 2)) & 3
        scales[i] = np.uint8((low | (high << 4)) - 32)
    _two_bits(block, 32, codes)
    for group in range(8):
        for i in range(32):
            codes[group * 32 + i] |= ((block[i] >> group) & 1) << 2
    return _half(block, 108), np.uint16(0)


@njit(inline="always")
def _six_bit_scales(block, at, scales, minimums):
    for i in range(4):
        scales[i] = block[at + i] & 63
        minimums[i] = block[at + 4 + i] & 63
        scales[i + 4] = (block[at + 8 + i] & 15) | ((block[at + i] >> 6) << 4)
        minimums[i + 4] = (block[at + 8 + i] >> 4) | ((block[at + 4 + i] >> 6) << 4)


@_reads("Q4_K")
def _q4_k(block, codes, scales, minimums):
    _six_bit_scales(block, 4, scales, minimums)
    _four_bits(block, 16, codes)
    return _half(block, 0), _half(block, 2)


@_reads("Q5_K")
def _q5_k(block, codes, scales, minimums):
    _six_bit_scales(block, 4, scales, minimums)
    _four_bits(block, 48, codes)
    for group in range(8):
        for i in range(32):
            codes[group * 32 + i] |= ((block[16 + i] >> group) & 1) << 4
    return _half(block, 0), _half(block, 2)


@_reads("Q6_K")
def _q6_k(block, codes, scales, minimums):
    for i in range(16):
        scales[i] = block[192 + i]
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                low = (block[half * 64 + quarter % 2 * 32 + i] >> (quarter // 2 * 4)) & 15
                high = (block[128 + half * 32 + i] >> (quarter * 2)) & 3
                codes[half * 128 + quarter * 32 + i] = low | (high << 4)
    return _half(block, 208), np.uint16(0)


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
    reader = _READERS[name.literal_value]
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
