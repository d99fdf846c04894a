"""The memory layout of packed weights: GGML's quantized blocks, rearranged for products with wide vectors and few rows.

A tile is sixteen rows of a matrix. Within a tile, the codes of 32 columns form a group of eight vectors of 64 bytes:
vector j has columns 4j to 4j + 3 of all sixteen rows. One int8 dot product instruction thus adds four columns for every
row, and a group's scales are one vector. Codes of fewer than eight bits are split into planes: the low plane packs the
low 4 (or 2) bits of several vectors into one, and the high plane has the other bits. The bits are those of the file;
nothing is rounded.

Every format is `weight = scale * (code - zero) + minimum`, with one scale per 16, 32 or more columns. Formats with
blocks of 256 columns (K-quants) have two-level scales, a float16 times an integer, and two-level minimums.

Formats with a table use codes as indices into sixteen int8 numbers, which are multiplied. F16 and BF16 are 16-bit
numbers in the same tiles, column by column of sixteen rows, without codes or scales. Formats with a codebook have the
planes of `cpu_ops.codebooks` in their groups, and a table.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from dataclasses import dataclass

import numpy as np

from hetero_kv.cpu_ops.codebooks import CODEBOOKS, NEGATIVE, Codebook

TILE = 16
"""Rows of a tile."""
GROUP = 32
"""Columns of a group; activations have one scale per group."""
VECTORS = 8
"""Vectors of codes per group and tile."""
_VECTOR_BYTES = 64
_LANE_HALVES = 2 * TILE
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class WeightFormat:
    """One format of quantized weights.

    name: GGML's. block_bytes: bytes of one block of a row in a file. low_bits: bits of a code in the low plane, 1, 2, 4
    or 8 (then signed). high_bits: bits in the high plane, 0 to 2. zero: subtracted from codes. groups: groups of 32
    columns in a block. scales: scales per group, 1 or 2; 0 if the block's scale is that of its groups. has_minimum:
    whether a minimum is added (subtracted in two-level formats). signed_scales: whether the integers of two-level
    scales are signed. table: the numbers that codes of up to 4 bits index; empty if codes are numbers. bytes_as: how a
    byte is a scale: 'e8m0', 2^(e - 128), or 'e4m3', half of such a float without sign; empty if scales are float16.
    number: 'float16' or 'bfloat16' for formats of 16-bit numbers, whose blocks are 32 numbers.
    codebook: of formats whose codes are entries of a grid; low_bits is then 0. unit: a power of two, a factor of every
    two-level scale.
    """

    name: str
    block_bytes: int
    low_bits: int
    high_bits: int = 0
    zero: int = 0
    groups: int = 1
    scales: int = 1
    has_minimum: bool = False
    signed_scales: bool = False
    table: tuple[int, ...] = ()
    bytes_as: str = ""
    number: str = ""
    codebook: Codebook | None = None
    unit: float = 1.0

    @property
    def signed(self) -> bool:
        """Whether codes, or the numbers of the table, are signed bytes."""
        return self.low_bits == 8 or bool(self.table)

    @property
    def two_levels(self) -> bool:
        """Whether a scale is the block's float16, times an integer of the group if it has one."""
        return self.groups > 1 and not self.bytes_as

    @property
    def parts(self) -> int:
        """Parts of a group with a scale each."""
        return max(self.scales, 1)

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return GROUP * self.groups

    @property
    def head_bytes(self) -> int:
        """Bytes of a tile's block before its groups: the first level of scales and minimums."""
        return _LANE_HALVES * (1 + self.has_minimum) if self.two_levels else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group before its codes: scales, then minimums."""
        if self.number or self.codebook:
            return 0
        small = self.two_levels or self.bytes_as
        return (self.scales * TILE if small else _LANE_HALVES) * (1 + self.has_minimum)

    @property
    def low_bytes(self) -> int:
        """Bytes of a group's low plane."""
        return _VECTOR_BYTES * self.low_bits

    @property
    def group_bytes(self) -> int:
        """Bytes of a group: scales and planes."""
        if self.codebook:
            return TILE * self.codebook.lane_bytes
        return self.scale_bytes + self.low_bytes + _VECTOR_BYTES * self.high_bits

    @property
    def record_bytes(self) -> int:
        """Bytes of a block of sixteen rows."""
        return self.head_bytes + self.groups * self.group_bytes

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a packed matrix of `rows` x `columns`; rows are padded to whole tiles."""
        return -(-rows // TILE) * (columns // self.columns) * self.record_bytes


def scales_of_bytes(kind: str) -> np.ndarray:
    """The scale that each byte is, [256] float32, by `WeightFormat.bytes_as`."""
    byte = np.arange(256)
    if kind == "e8m0":
        return np.ldexp(np.ones(256, np.float32), byte - 128)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    floats = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)) / 2
    return np.where(byte == 0x7F, 0, floats).astype(np.float32)


def _with_codebook(
    name: str, block_bytes: int, numbers: tuple[int, ...], below: tuple[int, ...], unit: float, scales: int = 1
) -> WeightFormat:
    """A format with a codebook; numbers, below: the numbers of its codes, and of those of negative columns."""
    table = numbers + (0,) * (NEGATIVE - len(numbers)) + below + (0,) * (NEGATIVE - len(below))
    return WeightFormat(name, block_bytes, 0, groups=8, scales=scales, table=table, codebook=CODEBOOKS[name], unit=unit)


def _of_either_sign(
    name: str, block_bytes: int, numbers: tuple[int, ...], unit: float, scales: int = 1
) -> WeightFormat:
    return _with_codebook(name, block_bytes, numbers, tuple(-number for number in numbers), unit, scales)


_IQ2 = (8, 25, 43)
_IQ3 = (4, 12, 20, 28, 36, 44, 52, 62)
# Eighths: -1, 0 or 1, plus or minus an eighth.
_IQ1, _IQ1_BELOW = (-7, 1, 9), (-9, -1, 7)

FORMATS = {
    each.name: each
    for each in (
        WeightFormat("Q4_0", 18, 4, zero=8),
        WeightFormat("Q4_1", 20, 4, has_minimum=True),
        WeightFormat("Q5_0", 22, 4, 1, zero=16),
        WeightFormat("Q5_1", 24, 4, 1, has_minimum=True),
        WeightFormat("Q8_0", 34, 8),
        WeightFormat("IQ4_NL", 18, 4, table=_IQ4),
        WeightFormat("MXFP4", 17, 4, table=_E2M1_DOUBLED, bytes_as="e8m0"),
        WeightFormat("NVFP4", 36, 4, groups=2, scales=2, table=_E2M1_DOUBLED, bytes_as="e4m3"),
        WeightFormat("Q1_0", 18, 1, groups=4, scales=0, table=(-1, 1, *[0] * 14)),
        WeightFormat("Q2_0", 18, 2, zero=1, groups=2, scales=0),
        # A file has five digits of base 3 in a byte, which take too long to separate at every product.
        WeightFormat("TQ1_0", 54, 2, zero=1, groups=8, scales=0),
        WeightFormat("TQ2_0", 66, 2, zero=1, groups=8, scales=0),
        WeightFormat("Q2_K", 84, 2, groups=8, scales=2, has_minimum=True),
        WeightFormat("Q3_K", 110, 2, 1, zero=4, groups=8, scales=2, signed_scales=True),
        WeightFormat("Q4_K", 144, 4, groups=8, has_minimum=True),
        WeightFormat("Q5_K", 176, 4, 1, groups=8, has_minimum=True),
        WeightFormat("Q6_K", 210, 4, 2, zero=32, groups=8, scales=2, signed_scales=True),
        WeightFormat("IQ4_XS", 136, 4, groups=8, signed_scales=True, table=_IQ4),
        _with_codebook("IQ1_S", 50, _IQ1, _IQ1_BELOW, 1 / 8),
        _with_codebook("IQ1_M", 56, _IQ1, _IQ1_BELOW, 1 / 8, scales=2),
        _of_either_sign("IQ2_XXS", 66, _IQ2, 1 / 8),
        _of_either_sign("IQ2_XS", 74, _IQ2, 1 / 8, scales=2),
        _of_either_sign("IQ2_S", 82, _IQ2, 1 / 8, scales=2),
        _of_either_sign("IQ3_XXS", 98, _IQ3, 1 / 4),
        _of_either_sign("IQ3_S", 110, (1, 3, 5, 7, 9, 11, 13, 15), 1.0),
        WeightFormat("F16", 64, 16, number="float16"),
        WeightFormat("BF16", 64, 16, number="bfloat16"),
    )
}
"""By GGML's names."""


def format_named(name: str) -> WeightFormat:
    """Returns the format of this name. Raises ValueError for an unknown one."""
    if name not in FORMATS:
        raise ValueError(f"weight format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]
