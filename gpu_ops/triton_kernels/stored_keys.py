"""Scores keys of four or eight bits as they are stored; `gpu_ops.stored_keys` defines the results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.estimated_masses import BlockMasses
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import GROUP, GROUP_BYTES, bits_of
from hetero_kv.gpu_ops.triton_kernels.estimated_masses import put_scores, scored_tokens
from hetero_kv.gpu_ops.triton_kernels.products import precision_of_singles
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, pointer, row_of, step_of
from hetero_kv.gpu_ops.triton_kernels.unpacking import unpacked

# Tokens per program, if their blocks are smaller.
_TOKENS = 128
# Channels at a time, those that share a scale.
_CHANNELS = tl.constexpr(GROUP)


@triton.jit
def _score_stored_keys(
    q, keys, offsets, listed, number, masses, token_scores, listed_count, capacity, kv_heads, scale, softcap,
    q0, q1, keys0, keys1, keys2, offsets0, offsets1, offsets2, number0,
    GROUP: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    LISTED: tl.constexpr, HAS_OFFSETS: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(1).to(tl.int64)
    row, head, member = each // kv_heads, each % kv_heads, tl.arange(0, BLOCK_GROUP)
    total = tl.load(number + row * number0).to(tl.int32)
    place, token, block, is_read, at_place, is_known = scored_tokens(
        listed, each, listed_count, total, TOKENS, LISTED, BLOCKS, BLOCK_TOKENS
    )
    query = q + row * q0 + (head * GROUP + member)[:, None] * q1
    keys = row_of(keys, row, keys0, tl.uint8, ALIGNMENT) + head * keys1
    vectors = keys + tl.maximum(block, 0).to(tl.int64) * keys2 + token * (DIM // 32 * BYTES)
    if HAS_OFFSETS:
        offsets = row_of(offsets, row, offsets0, tl.float16, ALIGNMENT) + head * offsets1
        offsets += tl.maximum(at_place, 0).to(tl.int64) * offsets2
    product = tl.zeros([BLOCK_GROUP, BLOCKS * BLOCK_TOKENS], tl.float32)
    of_offset = tl.zeros([BLOCK_GROUP, BLOCKS], tl.float32)
    # Without a block there may be no memory.
    is_known = is_known & (total > 0)
    for first in range(0, DIM, _CHANNELS):
        column = first + tl.arange(0, _CHANNELS)
        part = tl.load(query + column[None, :], mask=(member < GROUP)[:, None], other=0.0).to(tl.float32)
        tile = unpacked(vectors[None, :], column[:, None], is_read[None, :], BITS, BYTES)
        product = tl.dot(part, tile, product, input_precision=PRECISION)
        if HAS_OFFSETS:
            added = tl.load(offsets[None, :] + column[:, None], mask=is_known[None, :], other=0.0).to(tl.float32)
            of_offset += tl.sum(part[:, :, None] * added[None, :, :], 1)
    scores = tl.reshape(product, [BLOCK_GROUP, BLOCKS, BLOCK_TOKENS])
    if HAS_OFFSETS:
        scores += of_offset[:, :, None]
    put_scores(
        scores * scale, place, token, is_read & (block >= 0), at_place, masses, token_scores, each, listed_count,
        capacity, softcap, GROUP, TOKENS, LISTED, SOFTCAPPED, BLOCK_GROUP, BLOCKS, BLOCK_TOKENS,
    )  # fmt: skip


def score_stored_keys(
    q: torch.Tensor, keys: Memory, offsets: Memory | None, listed: torch.Tensor | None, number: torch.Tensor,
    known: BlockMasses, scale: float, softcap: float | None, token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `gpu_ops.stored_keys.score_stored_keys_in_torch`."""
    (batch, heads, _, dim), (_, kv_heads, capacity, size, _) = q.shape, keys.shape
    group, bits, tokens = heads // kv_heads, bits_of(keys, dim), triton.next_power_of_2(size)
    blocks, count = max(1, _TOKENS // tokens), capacity if listed is None else listed.shape[2]
    # Without offsets others are named, and not read.
    added = keys if offsets is None else offsets
    _score_stored_keys[(triton.cdiv(count, blocks), batch * kv_heads)](
        q, pointer(keys), pointer(added), number if listed is None else listed, number, known.masses,
        known.masses if token_scores is None else token_scores, count, capacity, kv_heads, scale, softcap or 0.0,
        *q.stride()[:2], *keys.stride()[:3], *added.stride()[:3], step_of(number),
        GROUP=group, DIM=dim, TOKENS=size, BITS=bits, BYTES=GROUP_BYTES[bits], LISTED=listed is not None,
        HAS_OFFSETS=offsets is not None, SOFTCAPPED=bool(softcap), PRECISION=precision_of_singles(q),
        ALIGNMENT=alignment(keys, added),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCKS=blocks, BLOCK_TOKENS=tokens,
    )  # fmt: skip
