"""Scores blocks on a GPU and chooses the best of each list; `gpu_ops.block_choice` defines the results.

The choice needs no sort: the k-th largest score is searched digit by digit (radix select), and all scores above it are
taken. How many blocks there are may be a number on the device, so that a graph can be launched for any number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES, bits_of
from hetero_kv.gpu_ops.triton_kernels.products import precision_of, precision_of_singles
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, kind, pointer, row_of, step_of
from hetero_kv.gpu_ops.triton_kernels.softcap import softcapped
from hetero_kv.gpu_ops.triton_kernels.unpacking import vectors_at

# Bytes of a tile of vectors.
_TILE_BYTES = 16 << 10
# Scores per step of a list, over all query heads that it is chosen for.
_COMPARED = 4096


@triton.jit(do_not_specialize=["count"])
def _score_blocks(
    q, vectors, number, left_out, scores, count, capacity, kv_heads, scale, softcap,
    q0, q1, vectors0, vectors1, vectors2, number0,
    GROUP: tl.constexpr, DIM: tl.constexpr, VECTORS: tl.constexpr, LEFT_OUT: tl.constexpr, COUNTED: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr, ALIGNMENT: tl.constexpr,
    BOUNDS: tl.constexpr, SOFTCAPPED: tl.constexpr, AS_SINGLES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_LEFT_OUT: tl.constexpr,
):  # fmt: skip
    start, each = tl.program_id(0) * BLOCKS, tl.program_id(1).to(tl.int64)
    row, head = each // kv_heads, each % kv_heads
    total = count.to(tl.int64)
    if COUNTED:
        total = tl.load(number + row * number0)
    if start < total:
        column, member, block = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_GROUP), start + tl.arange(0, BLOCKS)
        is_column, is_member, is_block = column < DIM, member < GROUP, block < total
        queries = tl.load(
            q + row * q0 + (head * GROUP + member)[:, None] * q1 + column[None, :],
            mask=is_member[:, None] & is_column[None, :],
            other=0.0,
        )
        of_head = row_of(vectors, row, vectors0, KIND, ALIGNMENT) + head * vectors1
        at = of_head + block[None, :].to(tl.int64) * vectors2
        is_there = is_column[:, None] & is_block[None, :]
        if AS_SINGLES:
            queries = queries.to(tl.float32)
        best = tl.full([BLOCK_GROUP, BLOCKS], float("-inf"), tl.float32)
        for index in tl.static_range(VECTORS):
            if AS_SINGLES:
                tile = vectors_at(at + index * WIDTH, column[:, None], is_there, BITS, BYTES)
                if BOUNDS and BITS > 0:
                    # Packed apart, the maximum may be rounded below the minimum.
                    other = vectors_at(at + (1 - index) * WIDTH, column[:, None], is_there, BITS, BYTES)
                    tile = tl.maximum(tile, other) if index == 0 else tl.minimum(tile, other)
            else:
                tile = tl.load(at + index * WIDTH + column[:, None], mask=is_there, other=0.0)
            if BOUNDS:
                # The larger of two products is the maximum's for a positive number, and the minimum's for others.
                part = tl.maximum(queries, 0.0) if index == 0 else tl.minimum(queries, 0.0)
                product = tl.dot(part.to(queries.dtype), tile, input_precision=PRECISION)
                best = product if index == 0 else best + product
            else:
                best = tl.maximum(best, tl.dot(queries, tile, input_precision=PRECISION))
        best = best * scale
        if SOFTCAPPED:
            best = softcapped(best, softcap)
        if LEFT_OUT:
            place = tl.arange(0, BLOCK_LEFT_OUT)
            other = tl.load(left_out + each * LEFT_OUT + place, mask=place < LEFT_OUT, other=-1)
            is_left_out = tl.max((block[:, None] == other[None, :]).to(tl.int32), axis=1) > 0
            best = tl.where(is_left_out[None, :], float("-inf"), best)
        tl.store(
            scores + (each * GROUP + member)[:, None] * capacity + block[None, :],
            best,
            mask=is_member[:, None] & is_block[None, :],
        )


@triton.jit
def _sort_keys(
    scores, total, start, logarithms, capacity,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Whole numbers in the order of a list's scores from block `start` on, NaN the lowest; -1 after the last block."""
    head, member = tl.arange(0, BLOCK_HEADS)[:, None, None], tl.arange(0, BLOCK_GROUP)[None, :, None]
    block = start + tl.arange(0, BLOCKS)
    is_query, is_block = (head < HEADS) & (member < GROUP), block < total
    tile = tl.load(
        scores + (head * GROUP + member) * capacity + block[None, None, :],
        mask=is_query & is_block[None, None, :],
        other=float("-inf") if LARGEST else 0.0,
    )
    if SOFTMAX:
        # Shares in logarithms, which have the same order and never underflow.
        tile = tl.where(is_query, tile - logarithms[:, :, None], float("-inf"))
    reduced = tl.max(tile, 1) if LARGEST else tl.sum(tile, 1)
    # Heads that are no list's must not add an infinity.
    reduced = tl.sum(tl.where(tl.arange(0, BLOCK_HEADS)[:, None] < HEADS, reduced, 0.0), 0)
    reduced = tl.where(reduced == 0, 0.0, reduced)
    bits = reduced.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000
    ordered = tl.where(reduced == reduced, ordered, 0)
    return tl.where(is_block, ordered, -1)


@triton.jit(do_not_specialize=["count"])
def _choose_blocks(
    scores, number, chosen, count, capacity, n, number0, lists,
    HEADS: tl.constexpr, GROUP: tl.constexpr, COUNTED: tl.constexpr, LARGEST: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    scores, chosen = scores + which * HEADS * GROUP * capacity, chosen + which * HEADS * n
    total = count.to(tl.int64)
    if COUNTED:
        total = tl.load(number + which // lists * number0)
    needed = tl.minimum(total, n).to(tl.int32)

    logarithms = tl.zeros([BLOCK_HEADS, BLOCK_GROUP], tl.float32)
    if SOFTMAX:
        head, member = tl.arange(0, BLOCK_HEADS)[:, None, None], tl.arange(0, BLOCK_GROUP)[None, :, None]
        is_query = (head < HEADS) & (member < GROUP)
        largest = tl.full([BLOCK_HEADS, BLOCK_GROUP], float("-inf"), tl.float32)
        for start in range(0, total, BLOCKS):
            block = (start + tl.arange(0, BLOCKS))[None, None, :]
            where = scores + (head * GROUP + member) * capacity + block
            tile = tl.load(where, mask=is_query & (block < total), other=float("-inf"))
            highest = tl.maximum(largest, tl.max(tile, 2))
            # Without a score yet this is exp(-inf - 0), not exp(nan).
            base = tl.where(highest == float("-inf"), 0.0, highest)
            logarithms = logarithms * tl.exp(largest - base) + tl.sum(tl.exp(tile - base[:, :, None]), 2)
            largest = highest
        is_some = logarithms > 0
        logarithms = tl.where(is_some, largest + tl.log(tl.where(is_some, logarithms, 1.0)), 0.0)

    # Of the numbers up to the n-th largest the highest four bits first, then the next ones.
    threshold = tl.full([], 0, tl.int64)
    for digit in range(8):
        step = tl.full([], 1, tl.int64) << (28 - 4 * digit)
        tried = threshold + tl.arange(0, 16).to(tl.int64) * step
        reached = tl.zeros([16], tl.int32)
        for start in range(0, total, BLOCKS):
            keys = _sort_keys(
                scores, total, start, logarithms, capacity,
                HEADS, GROUP, LARGEST, SOFTMAX, BLOCK_HEADS, BLOCK_GROUP, BLOCKS,
            )  # fmt: skip
            reached += tl.sum((keys[:, None] >= tried[None, :]).to(tl.int32), 0)
        threshold += (tl.sum((reached >= needed).to(tl.int32), 0) - 1) * step

    above = tl.full([], 0, tl.int32)
    for start in range(0, total, BLOCKS):
        keys = _sort_keys(
            scores, total, start, logarithms, capacity,
            HEADS, GROUP, LARGEST, SOFTMAX, BLOCK_HEADS, BLOCK_GROUP, BLOCKS,
        )  # fmt: skip
        above += tl.sum((keys > threshold).to(tl.int32), 0)
    # Of equal scores the first ones are taken.
    ties, seen, taken = needed - above, tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, total, BLOCKS):
        keys = _sort_keys(
            scores, total, start, logarithms, capacity,
            HEADS, GROUP, LARGEST, SOFTMAX, BLOCK_HEADS, BLOCK_GROUP, BLOCKS,
        )  # fmt: skip
        is_tie = (keys == threshold).to(tl.int32)
        is_taken = (keys > threshold) | ((is_tie > 0) & (seen + tl.cumsum(is_tie, 0) <= ties))
        place = taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        block = (start + tl.arange(0, BLOCKS)).to(tl.int64)
        for sharing in tl.static_range(HEADS):
            tl.store(chosen + sharing * n + place, block, mask=is_taken)
        seen += tl.sum(is_tie, 0)
        taken += tl.sum(is_taken.to(tl.int32), 0)
    for start in range(0, n, BLOCKS):
        place = start + tl.arange(0, BLOCKS)
        for sharing in tl.static_range(HEADS):
            tl.store(chosen + sharing * n + place, -3 - place.to(tl.int64), mask=(place >= needed) & (place < n))


def score(
    q: torch.Tensor,
    vectors: Memory,
    count: int | torch.Tensor,
    bounds: bool,
    scale: float,
    softcap: float | None,
    left_out: torch.Tensor | None,
) -> torch.Tensor:
    """As `gpu_ops.block_choice.block_scores_in_torch`; entries after the last block are not written."""
    (batch, heads, _, dim), (_, kv_heads, capacity, number, stored) = q.shape, vectors.shape
    group, left = heads // kv_heads, 0 if left_out is None else left_out.shape[2]
    scores = torch.empty(batch, kv_heads, group, capacity, dtype=torch.float32, device=q.device)
    block_dim, is_alike = max(16, triton.next_power_of_2(dim)), q.dtype is vectors.dtype
    width = block_dim * (q.element_size() if is_alike else 4)
    blocks = max(16, min(64, triton.next_power_of_2(capacity), _TILE_BYTES // width))
    counted, bits = isinstance(count, torch.Tensor), bits_of(vectors, dim)
    _score_blocks[(triton.cdiv(capacity, blocks), batch * kv_heads)](
        q, pointer(vectors), count if counted else q, q if left_out is None else left_out, scores,
        0 if counted else count, capacity, kv_heads, scale, softcap or 0.0, *q.stride()[:2], *vectors.stride()[:3],
        step_of(count),
        GROUP=group, DIM=dim, VECTORS=number, LEFT_OUT=left, COUNTED=counted, WIDTH=stored, BITS=bits,
        BYTES=GROUP_BYTES.get(bits, 0), KIND=kind(vectors), ALIGNMENT=alignment(vectors), BOUNDS=bounds,
        SOFTCAPPED=bool(softcap), AS_SINGLES=not is_alike,
        PRECISION=precision_of(q) if is_alike else precision_of_singles(q),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCKS=blocks, BLOCK_DIM=block_dim,
        BLOCK_LEFT_OUT=triton.next_power_of_2(max(1, left)),
    )  # fmt: skip
    return scores


def choose(
    scores: torch.Tensor, count: int | torch.Tensor, n: int, largest: bool, softmax: bool, is_shared: bool
) -> torch.Tensor:
    """As `gpu_ops.block_choice.best_blocks_in_torch`, for contiguous scores."""
    batch, kv_heads, group, capacity = scores.shape
    chosen = torch.empty(batch, kv_heads, n, dtype=torch.int64, device=scores.device)
    heads = kv_heads if is_shared else 1
    block_heads, block_group = triton.next_power_of_2(heads), triton.next_power_of_2(group)
    blocks = max(16, min(512, triton.next_power_of_2(capacity), _COMPARED // (block_heads * block_group)))
    counted = isinstance(count, torch.Tensor)
    _choose_blocks[(batch * kv_heads // heads,)](
        scores, count if counted else scores, chosen, 0 if counted else count, capacity, n, step_of(count),
        kv_heads // heads,
        HEADS=heads, GROUP=group, COUNTED=counted, LARGEST=largest, SOFTMAX=softmax,
        BLOCK_HEADS=block_heads, BLOCK_GROUP=block_group, BLOCKS=blocks, num_warps=8,
    )  # fmt: skip
    return chosen
