"""The memory layout of packed weights: GGML's quantized blocks, rearranged for products with wide vectors and few rows.

A tile is sixteen rows of a matrix. Within a tile, the codes of 32 columns form a group of eight vectors of 64 bytes:
vector j has columns 4j to 4j + 3 of all sixteen rows. One int8 dot product instruction thus adds four columns for every
row, and a group's scales are one vector. Codes of fewer than eight bits are split into planes: the low plane packs the
low 4 (or 2) bits of several vectors into one, and the high plane has the other bits. The bits are those of the file;
nothing is rounded.

Every format is `weight = scale * (code - zero) + minimum`, with one scale per 16 or 32 columns. Formats with blocks of
256 columns (K-quants) have two-level scales, a float16 times an integer, and two-level minimums.

Formats with a table use codes as indices into sixteen int8 numbers, which are multiplied. F16 and BF16 are 16-bit
numbers in the same tiles, column by column of sixteen rows, without codes or scales.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from dataclasses import dataclass

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

    name: GGML's. block_bytes: bytes of one block of a row in a file. low_bits: bits of a code in the low plane, 2, 4 or
    8 (then signed). high_bits: bits in the high plane, 0 to 2. zero: subtracted from codes. groups: groups of 32
    columns in a block, 1 or 8. scales: scales per group, 1 or 2. has_minimum: whether a minimum is added (subtracted in
    two-level formats). signed_scales: whether the integers of two-level scales are signed. table: the numbers that
    4-bit codes index; empty if codes are numbers. exponents: whether a scale is a power of two, stored as a byte e that
    means 2^(e - 128). number: 'float16' or 'bfloat16' for formats of 16-bit numbers, whose blocks are 32 numbers.
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
    exponents: bool = False
    number: str = ""

    @property
    def signed(self) -> bool:
        """Whether codes, or the numbers of the table, are signed bytes."""
        return self.low_bits == 8 or bool(self.table)

    @property
    def two_levels(self) -> bool:
        """Whether a scale is the block's float16 times an integer of the group."""
        return self.groups > 1

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
        if self.number:
            return 0
        small = self.two_levels or self.exponents
        return (self.scales * TILE if small else _LANE_HALVES) * (1 + self.has_minimum)

    @property
    def low_bytes(self) -> int:
        """Bytes of a group's low plane."""
        return _VECTOR_BYTES * self.low_bits

    @property
    def group_bytes(self) -> int:
        """Bytes of a group: scales and planes."""
        return self.scale_bytes + self.low_bytes + _VECTOR_BYTES * self.high_bits

    @property
    def record_bytes(self) -> int:
        """Bytes of a block of sixteen rows."""
        return self.head_bytes + self.groups * self.group_bytes

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a packed matrix of `rows` x `columns`; rows are padded to whole tiles."""
        return -(-rows // TILE) * (columns // self.columns) * self.record_bytes


FORMATS = {
    each.name: each
    for each in (
        WeightFormat("Q4_0", 18, 4, zero=8),
        WeightFormat("Q4_1", 20, 4, has_minimum=True),
        WeightFormat("Q5_0", 22, 4, 1, zero=16),
        WeightFormat("Q5_1", 24, 4, 1, has_minimum=True),
        WeightFormat("Q8_0", 34, 8),
        WeightFormat("IQ4_NL", 18, 4, table=_IQ4),
        WeightFormat("MXFP4", 17, 4, table=_E2M1_DOUBLED, exponents=True),
        WeightFormat("Q2_K", 84, 2, groups=8, scales=2, has_minimum=True),
        WeightFormat("Q3_K", 110, 2, 1, zero=4, groups=8, scales=2, signed_scales=True),
        WeightFormat("Q4_K", 144, 4, groups=8, has_minimum=True),
        WeightFormat("Q5_K", 176, 4, 1, groups=8, has_minimum=True),
        WeightFormat("Q6_K", 210, 4, 2, zero=32, groups=8, scales=2, signed_scales=True),
        WeightFormat("IQ4_XS", 136, 4, groups=8, signed_scales=True, table=_IQ4),
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
