"""Sizes of register tiles (queries, tokens and columns) for each instruction set."""

from typing import NamedTuple

from hetero_kv.cpu_ops.cpu_features import ISAS

_MOST_QUERIES = {"avx512": 8, "avx2": 4, "neon": 4, "generic": 4}
_ACCUMULATORS = {"avx512": 16, "avx2": 8, "neon": 16, "generic": 8}
"""Vectors of partial sums in a tile: enough to cover the latency of two multiply-adds a cycle. The remaining registers
hold operands."""
_ROWS_APART = {"avx512": 28, "avx2": 12, "neon": 24, "generic": 12}
"""Vectors of partial sums for gathered value rows: more, because weights are read from memory each time."""


class TileSizes(NamedTuple):
    """The division of a group of query heads into tiles.

    lanes: float32 numbers of a vector. full: number of tiles of `queries` queries; `rest` queries remain. row:
    `queries` rounded up to a power of two, the scores of one token in a tile. tokens: tokens scored at once, a divisor
    of the block size. columns: vectors of a value's columns that are accumulated at once.
    """

    lanes: int
    full: int
    queries: int
    rest: int
    row: int
    tokens: int
    columns: int

    @property
    def number(self) -> int:
        """The number of tiles, including the one of remaining queries."""
        return self.full + (self.rest > 0)


def tiles_for(isa: str, group: int, block_size: int) -> TileSizes:
    """Returns the tiles for `group` queries on an instruction set (`cpu_features.ISAS`)."""
    most, accumulators = _MOST_QUERIES[isa], _ACCUMULATORS[isa]
    queries = -(-group // -(-group // most))
    row = 1 << (queries - 1).bit_length()
    tokens = 1
    while 2 * tokens * queries <= accumulators and block_size % (2 * tokens) == 0:
        tokens *= 2
    columns = max(1, accumulators // queries)
    return TileSizes(ISAS[isa].float_lanes, group // queries, queries, group % queries, row, tokens, columns)


def columns_apart(isa: str, tile_queries: int, v_dim: int) -> int:
    """Returns how many vectors of columns of gathered value rows are accumulated at once for a tile of queries."""
    return min(_ROWS_APART[isa] // tile_queries, -(-v_dim // ISAS[isa].float_lanes))
