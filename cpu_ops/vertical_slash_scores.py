"""Vertical-slash scores: the attention of a few queries, summed per token (vertical) and per distance (slash)."""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.amx_tiles import begin_tiles, end_tiles
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.listed_keys import LEAST
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.qk_tile import (
    QUERY_COLUMNS,
    QKTileShape,
    block_weights,
    capped,
    emit_weights,
    keys_of_block,
    mask_after,
    score_block,
    tile_queries,
)
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.softmax_rows import rows_most
from hetero_kv.cpu_ops.threads import kernel_threads
from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, integer, offset

_SPAN = 1024
"""Tokens of a thread's unit of work, a multiple of `QUERY_BLOCK`."""
_INT1 = types.Array(types.int64, 1, "C")


def vertical_slash_scores(
    q: np.ndarray, past_k: np.ndarray, k: np.ndarray, scale: float, softcap: float = 0.0, threads: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the attention of a sequence's last queries, summed over the queries, per token and per distance.

    q: [heads, queries, k_dim], the last queries, at most `QUERY_COLUMNS`, of heads that share keys. past_k, k: as for
    `qk_tile.tile_queries`. The last query belongs to the last token. scale and softcap (0: none) as for
    `run_attention.attend_runs`. threads: number of threads (None: Numba's setting).

    Returns two arrays [heads, past + n] float32, to a relative error of about 1e-5. Raises ValueError or TypeError for
    arrays that do not fit together or that the CPU cannot multiply.
    """
    numbers = tile_queries(q, past_k, k, scale)
    (heads, queries, k_dim), n, is_bits = q.shape, k.shape[0], q.dtype == np.uint16
    if not queries <= min(n, QUERY_COLUMNS):
        raise ValueError(f"{queries} queries are not the last ones of {n} tokens, {QUERY_COLUMNS} at most")
    total = past_k.shape[0] + n
    spans = -(-total // _SPAN)
    # Per span, in base two: the largest scores, and the sums of weights relative to them. Index 0 later has the totals.
    most, totals = np.empty((2, spans, heads, QUERY_COLUMNS), np.float32)
    by_token = np.empty((heads, spans * _SPAN), np.float32)
    by_place = np.empty((spans, heads, _SPAN + QUERY_COLUMNS), np.float32)
    region = address_of(_region(QKTileShape.of(is_bits, k_dim), softcap > 0))
    with kernel_threads(threads) as used:
        for is_first in (True, False):
            arguments = (*numbers, float(scale), float(softcap), is_first, most, totals, by_token, by_place)
            call_region("line sums", _variant(is_bits), region, arguments, used)
            if is_first:
                largest = most.max(axis=0)
                # Each span's sum is rescaled to the largest score of all spans.
                totals[0] = (totals * np.exp2(most - largest)).sum(axis=0)
                most[0] = largest
    return by_token[:, :total], _by_distance(by_place, total)


def compile_for(in_bfloat16: bool, k_dim: int, softcapped: bool) -> None:
    """Compile the kernel of one shape, or load it from Numba's on-disk cache, before the first prompt needs it."""
    _region(QKTileShape.of(in_bfloat16, k_dim), softcapped)


def _variant(in_bfloat16: bool) -> str:
    return "bfloat16" if in_bfloat16 else "float32"


@region_arguments("line sums")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(q, past_k, k, scale, softcap, is_first, most, totals, by_token, by_place); bfloat16 bits as words.

    is_first: True to compute most and totals [spans, heads, columns] of each span; False to compute by_token [heads,
    tokens] and by_place [spans, heads, places] from the overall most[0] and totals[0].
    """
    number = types.uint32 if variant == "bfloat16" else types.float32
    q, keys = types.Array(number, 3, "A"), types.Array(number, 2, "C")
    sums, by_token = types.Array(types.float32, 3, "C"), types.Array(types.float32, 2, "C")
    return q, keys, keys, types.float64, types.float64, types.boolean, sums, sums, by_token, sums


@intrinsic(prefer_literal=True)
def _add_lines(typingctx, lanes, scores, factor, shifts, shift_at, sums, s_at, ahead, places, p_at):
    """Sum a block's weights, 2 ** (factor * score - the column's shift), per token and per place (diagonal).

    Writes sums[s_at + t], the sum of token t's weights over columns, and places[p_at + t], the sum over columns c of
    the weight of token t - c. `ahead` [`QUERY_COLUMNS`] carries partial sums of places across blocks: it contributes
    the tokens before this block, and receives the sums for places after it. Scores are overwritten.
    """
    width = lanes.literal_value
    parts = QUERY_COLUMNS // width

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        s_pointer = array_pointer(context, builder, scores, arguments[1], integer(0))
        h_pointer = array_pointer(context, builder, shifts, arguments[3], arguments[4])
        t_pointer = array_pointer(context, builder, sums, arguments[5], arguments[6])
        a_pointer = array_pointer(context, builder, ahead, arguments[7], integer(0))
        p_pointer = array_pointer(context, builder, places, arguments[8], arguments[9])
        times = v.everywhere(arguments[2])
        shift = [builder.fneg(v.load(offset(builder, h_pointer, part * width))) for part in range(parts)]
        slots = v.slots([v.load(offset(builder, a_pointer, part * width)) for part in range(parts)])
        with cgutils.for_range(builder, integer(QUERY_BLOCK)) as loop:
            row = offset(builder, s_pointer, builder.mul(loop.index, integer(QUERY_COLUMNS)))
            weights = [emit_weights(v, offset(builder, row, part * width), times, shift[part]) for part in range(parts)]
            moved = [builder.fadd(builder.load(slot), weight) for slot, weight in zip(slots, weights, strict=True)]
            builder.store(builder.extract_element(moved[0], integer(0)), offset(builder, p_pointer, loop.index))
            for slot, vector, behind in zip(slots, moved, [*moved[1:], v.zero], strict=True):
                builder.store(v.shifted(vector, behind), slot)
            token = weights[0]
            for weight in weights[1:]:
                token = builder.fadd(token, weight)
            v.store(token, row)
        with cgutils.for_range_slice(builder, integer(0), integer(QUERY_BLOCK), integer(width)) as (first, _):
            row = offset(builder, s_pointer, builder.mul(first, integer(QUERY_COLUMNS)))
            tokens = [v.load(offset(builder, row, QUERY_COLUMNS * each)) for each in range(width)]
            v.store(v.lane_sums(tokens), offset(builder, t_pointer, first))
        for part, slot in enumerate(slots):
            v.store(builder.load(slot), offset(builder, a_pointer, part * width))
        return context.get_dummy_value()

    real, at = types.float32, types.int64
    return types.none(lanes, scores, real, shifts, at, sums, at, ahead, places, at), codegen


@cache
def _region(shape: QKTileShape, softcapped: bool) -> Any:
    """Compile a thread's share, spans thread, thread + threads, ..., for one shape.

    Numba's disk cache keys it by the constants below.
    """
    kind, words, depth, lanes, vectors = shape.kind, shape.words, shape.depth, shape.lanes, shape.vectors
    columns, tokens, span_tokens = QUERY_COLUMNS, QUERY_BLOCK, _SPAN
    by_tiles, whole_rows = kind == "tiles", words == depth
    variant, code_version = _variant(kind != "floats"), CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def add(thread, threads, arguments):
        q, past_k, k, scale, softcap, is_first, most, totals, by_token, by_place = arguments_at(
            "line sums", variant, arguments
        )
        (heads, queries), total, places = q.shape[:2], past_k.shape[0] + k.shape[0], by_place.shape[2]
        factor = np.float32(1 if softcapped else scale * LOG2_E)
        transposed_q, gathered = scratch(heads * depth, columns).view(q.dtype), scratch(tokens, depth).view(q.dtype)
        scores, ahead, shifts = scratch(tokens, columns), scratch(heads, columns), scratch(heads, columns)
        fresh = np.empty(columns, np.float32)
        # The last query is in the first column. Column c's query is then c tokens earlier, and its key at a fixed
        # distance is c tokens earlier as well.
        seen = total - np.arange(queries)
        for head in range(heads):
            for column in range(queries):
                for d in range(words):
                    transposed_q[head * depth + d, column] = q[head, queries - 1 - column, d]
            if is_first:
                continue
            for column in range(columns):
                # Unused columns get weight 0.
                shift = most[0, head, column] + np.log2(totals[0, head, column])
                shifts[head, column] = shift if column < queries else np.float32(1e30)
        found = np.empty(64, np.uint8)
        if by_tiles:
            begin_tiles(found)
        for span in range(thread, most.shape[0], threads):
            if is_first:
                most[span], totals[span] = LEAST, 0
            ahead[:] = 0
            end = min((span + 1) * span_tokens, total)
            for start in range(span * span_tokens, end, tokens):
                keys, key_at = keys_of_block(past_k, k, start, whole_rows, gathered)
                for head in range(heads):
                    score_block(kind, lanes, vectors, depth, keys, key_at, transposed_q, head * depth * columns, scores)
                    if softcapped:
                        capped(scores, scale, softcap)
                    if start + tokens > total - queries:
                        mask_after(scores, start, seen)
                    if not is_first:
                        _add_lines(
                            lanes, scores, factor, shifts, head * columns, by_token, head * by_token.shape[1] + start,
                            ahead[head], by_place, (span * heads + head) * places + start - span * span_tokens,
                        )  # fmt: skip
                        continue
                    so_far, sums = most[span, head], totals[span, head]
                    for i in range(0, columns, lanes):
                        if rows_most(lanes, lanes, scores, i, columns, tokens, so_far, i, fresh, i):
                            for column in range(i, i + lanes):
                                sums[column] *= exp2((so_far[column] - fresh[column]) * factor)
                                so_far[column] = fresh[column]
                        block_weights(lanes, scores, i, factor, so_far, sums)
            if is_first:
                for head in range(heads):
                    for column in range(columns):
                        most[span, head, column] *= factor
            else:
                stop = -(-end // tokens) * tokens - span * span_tokens
                for head in range(heads):
                    for column in range(columns):
                        by_place[span, head, stop + column] = ahead[head, column]
                by_place[span, :, stop + columns :] = 0
        if by_tiles:
            end_tiles(found)
        return np.int64(0 * code_version)

    return add


@njit(types.Array(types.float32, 2, "C")(types.Array(types.float32, 3, "C"), types.int64), cache=True, nogil=True)
def _by_distance(by_place, total):
    """Returns the sums per distance, [heads, total], from those per span and place, [spans, heads, places]."""
    spans, heads, places = by_place.shape
    sums = np.zeros((heads, total), np.float32)
    for span in range(spans):
        for head in range(heads):
            # Column c's query is c tokens before the last token, and place = key index + c: distance = last - place.
            last = total - 1 - span * _SPAN
            for place in range(min(places, last + 1)):
                sums[head, last - place] += by_place[span, head, place]
    return sums


@njit(_INT1(_INT1, types.int64, types.int64, types.int64), cache=True, nogil=True)
def distances_within(ranked, block, covered, budget):
    """Returns the best of the ranked distances, as many as make a block of queries see at most `budget` more tokens.

    ranked: distances, best first. block: queries of a block; each sees the key at each distance, and the block sees
    what any of its queries sees. covered: smaller distances are always seen, and cost nothing.
    """
    most = np.int64(covered)
    for distance in ranked:
        most = max(most, distance + 1)
    # Tokens by their distance from the block's last query.
    seen = np.zeros(most + block, np.bool_)
    seen[: covered + block - 1] = True
    count = np.int64(0)
    taken = np.empty(ranked.size, np.int64)
    for distance in ranked:
        if distance < covered:
            continue
        added = np.int64(0)
        for at in range(distance, distance + block):
            added += not seen[at]
        if added > budget:
            break
        budget -= added
        seen[distance : distance + block] = True
        taken[count] = distance
        count += 1
    return taken[:count].copy()
