"""Readers of the blocks of GGML's quantized formats, a device function per format.

A reader takes the bytes of one block of a row. It writes the unsigned codes of the block's columns (Q8_0: the bytes of
the signed codes), and the scales and minimums that are stored as bytes. It returns the bits of the block's
float16 scale and minimum.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

BLOCK_READERS: dict[str, Any] = {}
"""The reader of each format, a device function `(block, codes, scales, minimums) -> (scale bits, minimum bits)`."""


def _reads(name: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        BLOCK_READERS[name] = njit(function, inline="always")
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


@_reads("Q2_0")
def _q2_0(block, codes, scales, minimums):
    for i in range(64):
        codes[i] = (block[2 + i // 4] >> (2 * (i % 4))) & 3
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
