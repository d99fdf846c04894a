"""Codebooks: weights whose groups of four or eight columns are entries of a grid, with a sign for each column.

GGML's IQ1, IQ2 and IQ3 types have them. A group of 32 columns of one row is a few words, which are those of the file:
bits of indices into the grid, of signs, and of scales. In a packed tile the words of sixteen rows are side by side,
plane by plane, so that one vector has a word of every row. A grid's entry has a small code for each column, and the
format's table has the numbers of the codes, positive ones first.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

#: Added to codes of negative columns.
NEGATIVE = 8


@dataclass(frozen=True)
class Bits:
    """A bit field of a lane's words: `count` bits at `at`, or at `at + i * step` for its i-th element."""

    at: int
    step: int
    count: int


@dataclass(frozen=True)
class Codebook:
    """Where the parts of a group lie in the words of a lane, as bits of the planes in their order.

    grid: the type in the package gguf that has the grid. width: columns of an entry, 4 or 8. planes: for each plane,
    the bytes of a lane, the first byte in a block of a file, and the bytes from a group to the next; a first byte of -1
    if `moved` fills the plane. low, high: bits of an index, from the lowest. signs: of eight columns: 8 bits, 7 bits
    whose parity is the eighth, or 1 bit for all. scale: an integer n of each part, which means 2n + 1. moved: bits that
    lie elsewhere in a block of a file: (byte there, bit in it, bits, plane or -1 for the block's scale, group, bit).
    """

    grid: str
    width: int
    planes: tuple[tuple[int, int, int], ...]
    low: Bits
    signs: Bits
    scale: Bits
    high: Bits | None = None
    moved: tuple[tuple[int, int, int, int, int, int], ...] = ()

    @property
    def lane_bytes(self) -> int:
        """Bytes of a group of one row."""
        return sum(size for size, _, _ in self.planes)

    def place(self, field: Bits, index: int) -> tuple[int, int]:
        """Returns the plane that has a field's `index`-th element, and the element's lowest bit there."""
        bit = field.at + index * field.step
        for plane, (size, _, _) in enumerate(self.planes):
            if bit < 8 * size:
                return plane, bit
            bit -= 8 * size
        raise ValueError(f"{field} lies beyond the planes of {self.grid}")


def _iq1_m_bits() -> tuple[tuple[int, int, int, int, int, int], ...]:
    """The scales of IQ1_M: four 16-bit words, each a quarter of the block's scale above four integers of three bits."""
    moved = [(49 + 2 * word, 4, 4, -1, 0, 4 * word) for word in range(4)]
    for group in range(8):
        for part in range(2):
            for bit in range(3):
                source = 16 * (group // 2) + 6 * (group % 2) + 3 * part + bit
                moved.append((48 + source // 8, source % 8, 1, 2, group, 4 * part + bit))
    return tuple(moved)


CODEBOOKS = {
    "IQ2_XXS": Codebook("IQ2_XXS", 8, ((4, 2, 8), (4, 6, 8)), Bits(0, 8, 8), Bits(32, 7, 7), Bits(60, 0, 4)),
    "IQ2_XS": Codebook(
        "IQ2_XS", 8, ((4, 2, 8), (4, 6, 8), (1, 66, 1)), Bits(0, 16, 9), Bits(9, 16, 7), Bits(64, 4, 4)
    ),
    "IQ2_S": Codebook(
        "IQ2_S", 8, ((4, 2, 4), (4, 34, 4), (1, 66, 1), (1, 74, 1)),
        Bits(0, 8, 8), Bits(32, 8, 8), Bits(72, 4, 4), high=Bits(64, 2, 2),
    ),
    "IQ3_XXS": Codebook(
        "IQ3_XXS", 4, ((4, 2, 8), (4, 6, 8), (4, 66, 4)), Bits(0, 8, 8), Bits(64, 7, 7), Bits(92, 0, 4)
    ),
    "IQ3_S": Codebook(
        "IQ3_S", 4, ((4, 2, 8), (4, 6, 8), (4, 74, 4), (1, 66, 1), (1, -1, 0)),
        Bits(0, 8, 8), Bits(64, 8, 8), Bits(104, 0, 4), high=Bits(96, 1, 1),
        moved=tuple((106 + group // 2, 4 * (group % 2), 4, 4, group, 0) for group in range(8)),
    ),
    "IQ1_S": Codebook(
        "IQ1_S", 8, ((4, 2, 4), (2, 34, 2)), Bits(0, 8, 8), Bits(47, 0, 1), Bits(44, 0, 3), high=Bits(32, 3, 3)
    ),
    "IQ1_M": Codebook(
        "IQ1_S", 8, ((4, 0, 4), (2, 32, 2), (1, -1, 0)),
        Bits(0, 8, 8), Bits(35, 4, 1), Bits(48, 4, 3), high=Bits(32, 4, 3), moved=_iq1_m_bits(),
    ),
}  # fmt: skip
"""By GGML's names."""


@cache
def grid_codes(name: str) -> np.ndarray:
    """The codes of a grid's entries [entries, width] uint8, by the name of its type."""
    # Imported here, since most models have no such weights.
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    return np.searchsorted(np.array(kind.grid_map), kind.grid[0, 0]).astype(np.uint8)


@cache
def grid_words(name: str) -> np.ndarray:
    """The entries of a grid as 32-bit words: byte k has column k's code, and above it column (k + 4)'s."""
    codes = grid_codes(name)
    low, high = codes[:, :4], codes[:, 4:]
    return np.ascontiguousarray(low | high << 4 if high.size else low).view(np.uint32)[:, 0]
