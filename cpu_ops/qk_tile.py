"""QKᵀ of a small query tile against all earlier keys, for kernels that measure which keys receive attention.

A tile holds `QUERY_COLUMNS` queries, one per vector lane. Keys are read in place. The product uses AMX tiles or
AVX512_BF16 dot products for bfloat16, and float32 arithmetic otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.amx_tiles import BLOCK, TILE, emit_multiply_by_tiles, multiplies_by_tiles
from hetero_kv.cpu_ops.bfloat16_tiles import COLUMNS, LANES, emit_score_tile_bf16
from hetero_kv.cpu_ops.cache_lines import neighbours_on_lines
from hetero_kv.cpu_ops.cpu_features import ISAS, isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, row_softcap
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.listed_keys import MASKED
from hetero_kv.cpu_ops.matrix_tiles import emit_multiply_tile
from hetero_kv.cpu_ops.run_attention import runs_in_bfloat16
from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, integer, offset

QUERY_COLUMNS = COLUMNS
"""Queries of a tile: keys are read once for all of them."""
_ROWS = 4
"""Keys of a register tile."""


@dataclass(frozen=True)
class QKTileShape:
    """The compile-time constants of the product of keys and queries.

    Attributes:
        kind: "tiles" (AMX, bfloat16), "dots" (AVX512_BF16) or "floats" (float32).
        words: numbers of a stored key; for bfloat16, pairs of numbers.
        depth: `words`, rounded up to whole tiles.
        lanes, vectors: lanes of a vector, and vectors of a register tile.
    """

    kind: str
    words: int
    depth: int
    lanes: int
    vectors: int

    @classmethod
    def of(cls, in_bfloat16: bool, k_dim: int) -> QKTileShape:
        """Returns the constants for this CPU and keys of `k_dim` numbers."""
        here = ISAS[isa()]
        words = k_dim // 2 if in_bfloat16 else k_dim
        if in_bfloat16 and multiplies_by_tiles():
            return cls("tiles", words, -(-words // TILE) * TILE, LANES, 4)
        kind, lanes = ("dots", LANES) if in_bfloat16 else ("floats", here.float_lanes)
        return cls(kind, words, words, lanes, 4 if here.registers == 32 else 2)


def tile_queries(q: np.ndarray, past_k: np.ndarray, k: np.ndarray, scale: float) -> list[np.ndarray]:
    """Returns [q, past_k, k] in the layout of the kernels.

    Keys are contiguous, queries are contiguous in the last dimension, and bfloat16 bits are viewed as 32-bit words.

    q: [heads, queries, k_dim]. past_k: [past, k_dim], keys before a chunk. k: [n, k_dim], the chunk's keys. All are
    float32, or all bits of bfloat16 (uint16) where `run_attention.runs_in_bfloat16`. Raises ValueError or TypeError for
    arrays that do not fit together or that the CPU cannot multiply, and for a scale that is not above 0.
    """
    if any(each.dtype != q.dtype for each in (past_k, k)) or q.dtype not in (np.uint16, np.float32):
        raise TypeError("q, past_k and k must be float32, or bits of bfloat16")
    k_dim = q.shape[2]
    if min(q.shape) < 1 or k.shape[1:] != (k_dim,) or past_k.shape[1:] != (k_dim,):
        raise ValueError(f"q {q.shape}, past {past_k.shape} and k {k.shape} do not fit")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be above 0")
    is_bits = q.dtype == np.uint16
    if is_bits and not runs_in_bfloat16(k_dim, k_dim):
        raise ValueError(f"dim {k_dim} must be a multiple of {LANES}, on a CPU with AVX512_BF16")
    queries = q if q.strides[2] == q.itemsize else np.ascontiguousarray(q)
    numbers = [queries, *map(neighbours_on_lines, (past_k, k))]
    return [each.view(np.uint32) for each in numbers] if is_bits else numbers


@device_function(error_model="numpy")
def keys_of_block(past_k, k, start, whole_rows, gathered):
    """Returns the array and the offset at which the keys of the `QUERY_BLOCK` tokens from `start` on are contiguous.

    Keys that are not contiguous, or narrower than `depth` (not `whole_rows`), are copied to `gathered` [tokens, depth],
    which is filled up with zeros.
    """
    before, stop = past_k.shape[0], start + gathered.shape[0]
    if whole_rows and stop <= before:
        return past_k, start * past_k.shape[1]
    if whole_rows and before <= start and stop <= before + k.shape[0]:
        return k, (start - before) * k.shape[1]
    last = min(stop, before + k.shape[0])
    for t in range(start, last):
        key = past_k[t] if t < before else k[t - before]
        for d in range(key.size):
            gathered[t - start, d] = key[d]
    gathered[last - start :] = 0
    return gathered, 0


@device_function(error_model="numpy")
def mask_after(scores, start, seen):
    """Mask scores [tokens, columns] of the tokens from `start` on: column c sees only tokens before `seen[c]`."""
    for column in range(seen.size):
        for t in range(max(seen[column] - start, 0), scores.shape[0]):
            scores[t, column] = MASKED


@device_function(fastmath={"contract", "nsz"}, error_model="numpy")
def capped(scores, scale, softcap):
    """Turn products into scores, softcap * tanh(product * scale / softcap), for exponentials of base two."""
    factor = np.float32(scale / softcap)
    for t in range(scores.shape[0]):
        for column in range(scores.shape[1]):
            scores[t, column] *= factor
        row_softcap(scores, t, scores.shape[1], np.float32(softcap) * LOG2_E)


@intrinsic(prefer_literal=True)
def score_block(typingctx, kind, lanes, vectors, depth, keys, k_at, q, q_at, scores):
    """Write the unscaled products of a block's keys and the queries to scores [`QUERY_BLOCK`, `QUERY_COLUMNS`].

    kind, lanes, vectors, depth: literals, as in `QKTileShape`. keys: rows of `depth`, beginning at `k_at`. q: rows of
    `QUERY_COLUMNS`, beginning at `q_at`, with one query per column.
    """
    how, width, across, size = (each.literal_value for each in (kind, lanes, vectors, depth))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        left = array_pointer(context, builder, keys, arguments[4], arguments[5])
        right = array_pointer(context, builder, q, arguments[6], arguments[7])
        target = array_pointer(context, builder, scores, arguments[8], integer(0))
        rows, step = (BLOCK, BLOCK) if how == "tiles" else (_ROWS, across * width)
        with cgutils.for_range_slice(builder, integer(0), integer(QUERY_BLOCK), integer(rows)) as (row, _):
            key = offset(builder, left, builder.mul(row, integer(size)))
            place = offset(builder, target, builder.mul(row, integer(QUERY_COLUMNS)))
            for column in range(0, QUERY_COLUMNS, step):
                query, score = offset(builder, right, column), offset(builder, place, column)
                if how == "tiles":
                    pitch = integer(size), integer(size), query, integer(QUERY_COLUMNS), score, integer(QUERY_COLUMNS)
                    emit_multiply_by_tiles(builder, False, key, *pitch)
                elif how == "dots":
                    emit_score_tile_bf16(builder, rows, size, QUERY_COLUMNS, key, query, score)
                else:
                    emit_multiply_tile(
                        Vectors(builder, width), rows, across, False, key, integer(size), integer(1), integer(size),
                        query, integer(QUERY_COLUMNS), score, integer(QUERY_COLUMNS),
                    )  # fmt: skip
        return context.get_dummy_value()

    at = types.int64
    return types.none(kind, lanes, vectors, depth, keys, at, q, at, scores), codegen


def emit_weights(v: Vectors, score: ir.Value, factor: ir.Value, shift: ir.Value) -> ir.Value:
    """Emit the code of 2 ** (factor * score + shift) for a vector of scores at a pointer."""
    return v.exp2(v.call("fmuladd", v.load(score), factor, shift), coarse=True)


@intrinsic(prefer_literal=True)
def block_weights(typingctx, lanes, scores, column, factor, most, totals):
    """Add the weights 2 ** (factor * (score - most)) of `lanes` columns of a block to `totals`; most: per column."""
    width = lanes.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        s_pointer, m_pointer, t_pointer = (
            array_pointer(context, builder, array, arguments[index], arguments[2])
            for array, index in ((scores, 1), (most, 4), (totals, 5))
        )
        times = v.everywhere(arguments[3])
        shift = builder.fneg(builder.fmul(v.load(m_pointer), times))
        (total,) = v.slots([v.load(t_pointer)])
        with cgutils.for_range(builder, integer(QUERY_BLOCK)) as loop:
            place = offset(builder, s_pointer, builder.mul(loop.index, integer(QUERY_COLUMNS)))
            builder.store(builder.fadd(builder.load(total), emit_weights(v, place, times, shift)), total)
        v.store(builder.load(total), t_pointer)
        return context.get_dummy_value()

    real, at = types.float32, types.int64
    return types.none(lanes, scores, at, real, most, totals), codegen


@intrinsic(prefer_literal=True)
def free_block_weights(typingctx, lanes, scores, column, factor, most, totals, named, n_at, bits, free, f_at):
    """As `block_weights`; also write the sum over tokens that are not named for a column to free[f_at + column].

    named: one 32-bit mask per token, from `n_at` on. A token is named for a column if its mask shares a bit with
    bits[column].
    """
    width = lanes.literal_value
    word = ir.IntType(32)
    words = ir.VectorType(word, width)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        s_pointer, m_pointer, t_pointer, b_pointer = (
            array_pointer(context, builder, array, arguments[index], arguments[2])
            for array, index in ((scores, 1), (most, 4), (totals, 5), (bits, 8))
        )
        n_pointer = array_pointer(context, builder, named, arguments[6], arguments[7])
        f_pointer = array_pointer(context, builder, free, arguments[9], builder.add(arguments[10], arguments[2]))
        own = builder.load(builder.bitcast(b_pointer, words.as_pointer()), align=4, typ=words)
        times = v.everywhere(arguments[3])
        shift = builder.fneg(builder.fmul(v.load(m_pointer), times))
        total, sums = v.slots([v.load(t_pointer), v.zero])
        builder.store(v.zero, sums)
        with cgutils.for_range(builder, integer(QUERY_BLOCK)) as loop:
            place = offset(builder, s_pointer, builder.mul(loop.index, integer(QUERY_COLUMNS)))
            weight = emit_weights(v, place, times, shift)
            builder.store(builder.fadd(builder.load(total), weight), total)
            mark = v.everywhere(builder.load(offset(builder, n_pointer, loop.index)))
            is_free = builder.icmp_unsigned("==", builder.and_(mark, own), ir.Constant(words, None))
            builder.store(builder.fadd(builder.load(sums), builder.select(is_free, weight, v.zero)), sums)
        v.store(builder.load(total), t_pointer)
        v.store(builder.load(sums), f_pointer)
        return context.get_dummy_value()

    real, at = types.float32, types.int64
    return types.none(lanes, scores, at, real, most, totals, named, at, bits, free, at), codegen
