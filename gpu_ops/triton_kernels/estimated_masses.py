"""Scores of blocks' means and coarse keys, and shares of the attention; `gpu_ops.estimated_masses` defines them."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.estimated_masses import CHANNELS, TOKENS, BlockMasses
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES, bits_of
from hetero_kv.gpu_ops.triton_kernels.products import precision_of_singles
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, kind, pointer, row_of, step_of
from hetero_kv.gpu_ops.triton_kernels.softcap import softcapped
from hetero_kv.gpu_ops.triton_kernels.unpacking import vectors_at

# Blocks per program that are scored by their means, and tokens of those scored by their keys.
_BLOCKS, _TOKENS = 32, 128
# Numbers per step of a sum, over all query heads of a kv head.
_SUMMED = 8192
_TOKENS_OF_TILE, _CHANNELS = tl.constexpr(TOKENS), tl.constexpr(CHANNELS)
# Added and subtracted, it rounds a float32 to the nearest whole number, ties to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _score_means(
    q, vectors, number, plain, weights, likely, masses, capacity, kv_heads, scale, softcap, log_n, most,
    q0, q1, vectors0, vectors1, vectors2, number0,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPREAD: tl.constexpr, SOFTCAPPED: tl.constexpr,
    BITS: tl.constexpr, BYTES: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    start, each = tl.program_id(0) * BLOCKS, tl.program_id(1).to(tl.int64)
    row, head = each // kv_heads, each % kv_heads
    column, member, block = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_GROUP), start + tl.arange(0, BLOCKS)
    is_column, is_member, is_block = column < DIM, member < GROUP, block < tl.load(number + row * number0)
    queries = tl.load(
        q + row * q0 + (head * GROUP + member)[:, None] * q1 + column[None, :],
        mask=is_member[:, None] & is_column[None, :],
        other=0.0,
    ).to(tl.float32)
    vectors = row_of(vectors, row, vectors0, KIND, ALIGNMENT)
    at = vectors + head * vectors1 + block[None, :].to(tl.int64) * vectors2
    is_there = is_column[:, None] & is_block[None, :]
    tile = vectors_at(at, column[:, None], is_there, BITS, BYTES)
    product = tl.dot(queries, tile, input_precision=PRECISION) * scale
    mean = product
    deviation = tl.zeros([BLOCK_GROUP, BLOCKS], tl.float32)
    if SPREAD:
        tile = vectors_at(at + WIDTH, column[:, None], is_there, BITS, BYTES)
        deviation = tl.sqrt(tl.dot(queries * queries, tile * tile, input_precision=PRECISION)) * scale
    if SOFTCAPPED:
        mean = softcapped(product, softcap)
        deviation = softcapped(product + deviation, softcap) - mean
    spread = tl.where(deviation < most, log_n + 0.5 * deviation * deviation, deviation * most)
    written = (each * GROUP + member)[:, None] * capacity + block[None, :]
    is_number, is_some = is_member[:, None] & (block < capacity)[None, :], is_block[None, :]
    tl.store(plain + written, tl.where(is_some, product, float("-inf")), mask=is_number)
    tl.store(weights + written, tl.where(is_some, mean + log_n, float("-inf")), mask=is_number)
    tl.store(likely + written, tl.where(is_some, mean + deviation, float("-inf")), mask=is_number)
    tl.store(masses + written, tl.where(is_some, mean + spread, float("-inf")), mask=is_number)


@triton.jit
def scored_tokens(
    listed, each, listed_count, total,
    TOKENS: tl.constexpr, LISTED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """A program's blocks, and their tokens side by side, with padding up to a power of two.

    Returns of each token its block's place in the list, the token in it, the block, and whether it is read; and of each
    block the block and whether it is read. The block of padding is -1.
    """
    start, index = tl.program_id(0) * BLOCKS, tl.arange(0, BLOCKS * BLOCK_TOKENS)
    place, token = start + index // BLOCK_TOKENS, index % BLOCK_TOKENS
    of_block = start + tl.arange(0, BLOCKS)
    block, at_place, is_read, is_known = place, of_block, place < total, of_block < total
    if LISTED:
        # No load's mask comes from these, which Triton 3.6 does not compile: padding reads the first block.
        # Without a block there may be no memory.
        is_read, is_known = (place < listed_count) & (total > 0), of_block < listed_count
        block = tl.load(listed + each * listed_count + place, mask=is_read, other=-1)
        at_place = tl.load(listed + each * listed_count + of_block, mask=is_known, other=-1)
    return place, token, block, is_read & (token < TOKENS), at_place, is_known


@triton.jit
def put_scores(
    scores, place, token, is_token, at_place, masses, token_scores, each, listed_count, capacity, softcap,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, LISTED: tl.constexpr, SOFTCAPPED: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write scores [BLOCK_GROUP, BLOCKS, BLOCK_TOKENS] of a program's tokens, and the masses of its blocks."""
    member = tl.arange(0, BLOCK_GROUP)
    is_member = member < GROUP
    if SOFTCAPPED:
        scores = softcapped(scores, softcap)
    is_scored = tl.reshape(is_token, [BLOCKS, BLOCK_TOKENS])[None, :, :]
    scores = tl.where(is_scored, scores, float("-inf"))
    if LISTED:
        to = token_scores + (each * GROUP + member)[:, None] * (listed_count * TOKENS)
        is_number = is_member[:, None] & ((place < listed_count) & (token < TOKENS))[None, :]
        flat = tl.reshape(scores, [BLOCK_GROUP, BLOCKS * BLOCK_TOKENS])
        tl.store(to + (place * TOKENS + token)[None, :], flat, mask=is_number)
    highest = tl.max(scores, 2)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    mass = tl.sum(tl.exp(scores - base[:, :, None]), 2)
    mass = tl.where(mass > 0, base + tl.log(tl.where(mass > 0, mass, 1.0)), float("-inf"))
    # Without a list, blocks that do not exist get a mass as well.
    is_written = at_place >= 0 if LISTED else at_place < capacity
    in_masses = (each * GROUP + member)[:, None] * capacity + tl.maximum(at_place, 0)[None, :]
    tl.store(masses + in_masses, mass, mask=is_member[:, None] & is_written[None, :])


@triton.jit
def _score_codes(
    q, codes, listed, number, plain, masses, token_scores, listed_count, capacity, kv_heads, scale, softcap,
    q0, q1, codes0, codes1, codes2, number0,
    GROUP: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr, LISTED: tl.constexpr,
    SOFTCAPPED: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_STEPS: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(1).to(tl.int64)
    row, head = each // kv_heads, each % kv_heads
    step, member = tl.arange(0, BLOCK_STEPS), tl.arange(0, BLOCK_GROUP)
    is_member = member < GROUP
    total = tl.load(number + row * number0).to(tl.int32)
    place, token, block, is_read, at_place, is_mean = scored_tokens(
        listed, each, listed_count, total, TOKENS, LISTED, BLOCKS, BLOCK_TOKENS
    )
    codes = row_of(codes, row, codes0, tl.uint8, ALIGNMENT)
    address = codes + head * codes1 + tl.maximum(block, 0).to(tl.int64) * codes2
    tile_of, within = token // _TOKENS_OF_TILE, token % _TOKENS_OF_TILE
    is_there = (step < STEPS)[:, None] & is_read[None, :]
    word_at = address.to(tl.pointer_type(tl.int32))[None, :]
    words = tl.load(
        word_at + (tile_of[None, :] * STEPS + step[:, None]) * _TOKENS_OF_TILE + within[None, :],
        mask=is_there, other=0,
    )  # fmt: skip
    scale_at = (address + TOKENS * STEPS * (_CHANNELS // 2)).to(tl.pointer_type(tl.float16))
    scales = tl.load(scale_at + token, mask=is_read, other=0.0).to(tl.float32)

    query = q + row * q0 + (head * GROUP + member)[:, None] * q1
    largest = tl.zeros([BLOCK_GROUP], tl.float32)
    for channel in tl.static_range(_CHANNELS):
        column = step * _CHANNELS + channel
        part = tl.load(query + column[None, :], mask=is_member[:, None] & (column < DIM)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part.to(tl.float32)), 1))
    is_some = largest > 0
    inverse = tl.div_rn(tl.full([BLOCK_GROUP], 127.0, tl.float32), tl.where(is_some, largest, 1.0))
    inverse = tl.where(is_some, inverse, 0.0)
    product = tl.zeros([BLOCK_GROUP, BLOCKS * BLOCK_TOKENS], tl.float32)
    for channel in tl.static_range(_CHANNELS):
        column = step * _CHANNELS + channel
        part = tl.load(query + column[None, :], mask=is_member[:, None] & (column < DIM)[None, :], other=0.0)
        whole = (part.to(tl.float32) * inverse[:, None] + _ROUNDING) - _ROUNDING
        # Four channels in the low halves of a word's bytes, then four in the high ones.
        code = ((words >> (8 * (channel % 4) + 4 * (channel // 4))) & 15) - 8
        # Whole numbers, of which half precision keeps every product exact.
        product = tl.dot(whole.to(tl.float16), code.to(tl.float16), product)

    in_masses = (each * GROUP + member)[:, None] * capacity + tl.maximum(at_place, 0)[None, :]
    means = tl.load(plain + in_masses, mask=is_member[:, None] & is_mean[None, :], other=0.0)
    scores = product * (largest * (scale / 127.0))[:, None] * scales[None, :]
    scores = tl.reshape(scores, [BLOCK_GROUP, BLOCKS, BLOCK_TOKENS]) + means[:, :, None]
    put_scores(
        scores, place, token, is_read & (block >= 0), at_place, masses, token_scores, each, listed_count, capacity,
        softcap, GROUP, TOKENS, LISTED, SOFTCAPPED, BLOCK_GROUP, BLOCKS, BLOCK_TOKENS,
    )  # fmt: skip


@triton.jit
def _added(logarithm, scores, is_there):
    """The log-sum-exp [n] of `logarithm` [n] and of scores [n, m]."""
    highest = tl.maximum(logarithm, tl.max(tl.where(is_there, scores, float("-inf")), 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.exp(logarithm - base) + tl.sum(tl.where(is_there, tl.exp(scores - base[:, None]), 0.0), 1)
    return tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def _log_totals(
    likely, masses, outside, number, totals, lists, capacity, outside1, number0, kv_heads,
    GROUP: tl.constexpr, PARTS: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64)
    member, part, total = (
        tl.arange(0, BLOCK_GROUP),
        tl.arange(0, BLOCK_PARTS),
        tl.load(number + each // kv_heads * number0),
    )
    is_member = member < GROUP
    is_part = is_member[:, None] & (part < PARTS)[None, :]
    nothing = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    lse = tl.load(
        outside + each * outside1 + part[None, :] * GROUP + member[:, None], mask=is_part, other=float("-inf")
    )
    around = _added(nothing, lse, is_part)
    best, every = nothing, around
    for start in range(0, total, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        is_there = is_member[:, None] & (block < total)[None, :]
        at = (each * GROUP + member)[:, None] * capacity + block[None, :]
        best = _added(best, tl.load(likely + at, mask=is_there, other=float("-inf")), is_there)
        every = _added(every, tl.load(masses + at, mask=is_there, other=float("-inf")), is_there)
    to = totals + each * GROUP + member
    tl.store(to, best, mask=is_member)
    tl.store(to + lists * GROUP, every, mask=is_member)
    tl.store(to + 2 * lists * GROUP, around, mask=is_member)


@triton.jit
def _mean_shares(
    scores, masses, totals, keys, shares, lists, count,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    each, member = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_GROUP)
    index = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_member, is_index = member < GROUP, index < count
    is_there = is_member[:, None] & is_index[None, :]
    at = (each * GROUP + member)[:, None] * count + index[None, :]
    best = tl.load(totals + each * GROUP + member, mask=is_member, other=0.0)
    every = tl.load(totals + (lists + each) * GROUP + member, mask=is_member, other=0.0)
    key = tl.exp(tl.load(scores + at, mask=is_there, other=float("-inf")) - best[:, None])
    share = tl.exp(tl.load(masses + at, mask=is_there, other=float("-inf")) - every[:, None])
    tl.store(keys + each * count + index, tl.sum(key, 0) / GROUP, mask=is_index)
    tl.store(shares + each * count + index, tl.sum(share, 0) / GROUP, mask=is_index)


def score_means(
    q: torch.Tensor, vectors: Memory, number: torch.Tensor, block_size: int, scale: float, softcap: float | None
) -> BlockMasses:
    """As `gpu_ops.estimated_masses.score_means_in_torch`."""
    (batch, heads, _, dim), (_, kv_heads, capacity, count, width) = q.shape, vectors.shape
    group, bits, log_n = heads // kv_heads, bits_of(vectors, dim), math.log(block_size)
    made = torch.empty(4, batch, kv_heads, group, capacity, dtype=torch.float32, device=q.device)
    found = BlockMasses(*made)
    _score_means[(triton.cdiv(capacity, _BLOCKS), batch * kv_heads)](
        q, pointer(vectors), number, *found, capacity, kv_heads, scale, softcap or 0.0, log_n, math.sqrt(2 * log_n),
        *q.stride()[:2], *vectors.stride()[:3], step_of(number),
        GROUP=group, DIM=dim, WIDTH=width, SPREAD=count == 2, SOFTCAPPED=bool(softcap), BITS=bits,
        BYTES=GROUP_BYTES.get(bits, 0), PRECISION=precision_of_singles(q), KIND=kind(vectors),
        ALIGNMENT=alignment(vectors),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCKS=_BLOCKS,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return found


def score_codes(
    q: torch.Tensor, codes: Memory, listed: torch.Tensor | None, number: torch.Tensor, block_size: int,
    known: BlockMasses, scale: float, softcap: float | None, token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `gpu_ops.estimated_masses.score_codes_in_torch`."""
    (batch, heads, _, dim), (_, kv_heads, capacity, _) = q.shape, codes.shape
    group, steps, tokens = heads // kv_heads, -(-dim // CHANNELS), triton.next_power_of_2(block_size)
    blocks, count = max(1, _TOKENS // tokens), capacity if listed is None else listed.shape[2]
    _score_codes[(triton.cdiv(count, blocks), batch * kv_heads)](
        q, pointer(codes), number if listed is None else listed, number, known.plain, known.masses,
        known.masses if token_scores is None else token_scores, count, capacity, kv_heads, scale, softcap or 0.0,
        *q.stride()[:2], *codes.stride()[:3], step_of(number),
        GROUP=group, DIM=dim, STEPS=steps, TOKENS=block_size, LISTED=listed is not None, SOFTCAPPED=bool(softcap),
        ALIGNMENT=alignment(codes),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCKS=blocks, BLOCK_TOKENS=tokens,
        BLOCK_STEPS=max(16, triton.next_power_of_2(steps)),
        # Queries are quantized as on the CPU, which rounds their products before it rounds to whole numbers.
        enable_fp_fusion=False,
    )  # fmt: skip


def log_totals(likely: torch.Tensor, masses: torch.Tensor, outside: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """As `gpu_ops.estimated_masses.log_totals_in_torch`, for contiguous tensors but `outside`, a part of them."""
    (batch, kv_heads, group, capacity), parts = masses.shape, outside.shape[2]
    totals = torch.empty(3, batch, kv_heads, group, dtype=torch.float32, device=masses.device)
    block_group = triton.next_power_of_2(group)
    _log_totals[(batch * kv_heads,)](
        likely, masses, outside, number, totals, batch * kv_heads, capacity, outside.stride(1), step_of(number),
        kv_heads,
        GROUP=group, PARTS=parts, BLOCK_GROUP=block_group, BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCKS=max(16, _SUMMED // block_group), num_warps=8,
    )  # fmt: skip
    return totals


def mean_shares(scores: torch.Tensor, masses: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gpu_ops.estimated_masses.mean_shares_in_torch`, for contiguous tensors."""
    batch, kv_heads, group, count = scores.shape
    keys, shares = torch.empty(2, batch, kv_heads, count, dtype=torch.float32, device=scores.device)
    block_group = triton.next_power_of_2(group)
    blocks = max(16, min(512, 2048 // block_group))
    _mean_shares[(triton.cdiv(count, blocks), batch * kv_heads)](
        scores, masses, totals, keys, shares, batch * kv_heads, count, GROUP=group, BLOCK_GROUP=block_group,
        BLOCKS=blocks,
    )  # fmt: skip
    return keys, shares
