"""Attention to listed slots and to the mean values of the rest; `gpu_ops.token_attention` defines the results.

As in `gpu_ops.triton_kernels.resident_attention` the keys are divided among programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES, bits_of
from hetero_kv.gpu_ops.token_attention import REST_PARTS, SPLITS, STORED_PARTS, TOKEN_PARTS, KeyOffsets, Parts
from hetero_kv.gpu_ops.triton_kernels.products import precision_of, precision_of_singles
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, kind, pointer, row_of, step_of
from hetero_kv.gpu_ops.triton_kernels.softcap import LOG2_E, softcapped
from hetero_kv.gpu_ops.triton_kernels.unpacking import unpacked

# Bytes of a tile of keys; values take as much, and prefetching doubles both.
_TILE_BYTES = 8 << 10


@triton.jit
def _attend_tokens(
    q, slot_keys, slot_values, slots, counts, tokens, offsets, lse, out, width, size, scale, softcap, kv_heads, q0, q1,
    table, blocks,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, K_BITS: tl.constexpr, K_BYTES: tl.constexpr,
    V_BITS: tl.constexpr, V_BYTES: tl.constexpr, OFFSET_TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    ALIGNMENT: tl.constexpr, STORED: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    split, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = each // kv_heads, each % kv_heads
    k_at, v_at, member = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_GROUP)
    is_k, is_v, is_member = k_at < K_DIM, v_at < V_DIM, member < GROUP
    queries = tl.load(
        q + row * q0 + (head * GROUP + member)[:, None] * q1 + k_at[None, :],
        mask=is_member[:, None] & is_k[None, :],
        other=0.0,
    )
    if STORED == 0:
        of_head = size.to(tl.int64) * (K_DIM if K_BITS == 0 else K_DIM // 32 * K_BYTES)
        slot_keys = row_of(slot_keys, row, kv_heads * of_head, KEY, ALIGNMENT) + head * of_head
        of_head = size.to(tl.int64) * (V_DIM if V_BITS == 0 else V_DIM // 32 * V_BYTES)
        slot_values = row_of(slot_values, row, kv_heads * of_head, VALUE, ALIGNMENT) + head * of_head
    if OFFSET_TOKENS > 0:
        of_row = blocks.to(tl.int64) * kv_heads * K_DIM
        offsets = row_of(offsets, row, of_row, tl.float16, ALIGNMENT) + head * K_DIM
    total = tl.load(counts + each)
    share = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    attended = tl.zeros([BLOCK_GROUP, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    stop = tl.minimum((split + 1) * share, total)
    for start in range(split * share, stop, BLOCK_KEYS):
        place = start + tl.arange(0, BLOCK_KEYS)
        is_key = place < stop
        at = tl.load(slots + each * width + place, mask=is_key, other=0).to(tl.int64)
        if STORED > 0:
            # Of a token where its block lies in the pool.
            block = tl.load(table + row * blocks + at // STORED, mask=is_key, other=0).to(tl.int64)
            at = (block * kv_heads + head) * STORED + at % STORED
        is_there = is_k[:, None] & is_key[None, :]
        if K_BITS == 0:
            tile = tl.load(slot_keys + k_at[:, None] + at[None, :] * K_DIM, mask=is_there, other=0.0)
        else:
            vectors = slot_keys + at[None, :] * (K_DIM // 32 * K_BYTES)
            tile = unpacked(vectors, k_at[:, None], is_there, K_BITS, K_BYTES)
        if OFFSET_TOKENS > 0:
            token = tl.load(tokens + each * width + place, mask=is_key, other=0)
            first = (token // OFFSET_TOKENS).to(tl.int64) * kv_heads * K_DIM
            added = tl.load(offsets + first[None, :] + k_at[:, None], mask=is_there, other=0.0)
            tile = tile.to(tl.float32) + added.to(tl.float32)
        tile = tile.to(queries.dtype)
        scores = tl.dot(queries, tile, input_precision=PRECISION) * scale
        if SOFTCAPPED:
            scores = softcapped(scores, softcap)
        scores = tl.where(is_key[None, :], scores * LOG2_E, float("-inf"))
        # A tile has at least one key.
        highest = tl.maximum(largest, tl.max(scores, 1))
        shrunk, weights = tl.exp2(largest - highest), tl.exp2(scores - highest[:, None])
        weight = weight * shrunk + tl.sum(weights, 1)
        is_there = is_key[:, None] & is_v[None, :]
        if V_BITS == 0:
            tile = tl.load(slot_values + at[:, None] * V_DIM + v_at[None, :], mask=is_there, other=0.0)
            tile = tile.to(queries.dtype)
        else:
            vectors = slot_values + at[:, None] * (V_DIM // 32 * V_BYTES)
            tile = unpacked(vectors, v_at[None, :], is_there, V_BITS, V_BYTES).to(queries.dtype)
        attended = tl.dot(weights.to(tile.dtype), tile, attended * shrunk[:, None], input_precision=PRECISION)
        largest = highest
    is_some = weight > 0
    divisor = tl.where(is_some, weight, 1.0)
    logarithm = tl.where(is_some, (largest + tl.log2(divisor)) / LOG2_E, float("-inf"))
    written = (each * PARTS + FIRST + split) * GROUP + member
    tl.store(lse + written, logarithm, mask=is_member)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        attended / divisor[:, None],
        mask=is_member[:, None] & is_v[None, :],
    )


@triton.jit
def _attend_rest(
    weights, masses, means, number, lse, out, rest, capacity, kv_heads, means0, means1, means2, number0,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, FIRST: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, BYTES: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    split, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v_at, member = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_GROUP)
    is_v, is_member = v_at < V_DIM, member < GROUP
    row = each // kv_heads
    means = row_of(means, row, means0, KIND, ALIGNMENT) + each % kv_heads * means1
    total = tl.load(number + row * number0).to(tl.int32)
    share = tl.cdiv(tl.cdiv(total, SPLITS), BLOCKS) * BLOCKS
    attended = tl.zeros([BLOCK_GROUP, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight, most, mass = tl.zeros([BLOCK_GROUP], tl.float32), largest, tl.zeros([BLOCK_GROUP], tl.float32)
    stop = tl.minimum((split + 1) * share, total)
    for start in range(split * share, stop, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        is_block = block < stop
        of_queries = (each * GROUP + member)[:, None] * capacity + block[None, :]
        is_there = is_member[:, None] & is_block[None, :]
        scores = tl.load(weights + of_queries, mask=is_there, other=float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        # Where every token of all blocks is attended to this is exp(-inf - 0), not exp(nan).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrunk, factors = tl.exp(largest - base), tl.exp(scores - base[:, None])
        weight = weight * shrunk + tl.sum(factors, 1)
        at, is_there = means + block[:, None].to(tl.int64) * means2, is_block[:, None] & is_v[None, :]
        if BITS == 0:
            tile = tl.load(at + v_at[None, :], mask=is_there, other=0.0).to(tl.float32)
        else:
            tile = unpacked(at, v_at[None, :], is_there, BITS, BYTES)
        attended = tl.dot(factors, tile, attended * shrunk[:, None], input_precision=PRECISION)
        largest = highest
        scores = tl.load(masses + of_queries, mask=is_member[:, None] & is_block[None, :], other=float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        mass = mass * tl.exp(most - base) + tl.sum(tl.exp(scores - base[:, None]), 1)
        most = highest
    is_some, is_mass = weight > 0, mass > 0
    divisor = tl.where(is_some, weight, 1.0)
    written = (each * PARTS + FIRST + split) * GROUP + member
    tl.store(lse + written, tl.where(is_some, largest + tl.log(divisor), float("-inf")), mask=is_member)
    logarithm = tl.where(is_mass, most + tl.log(tl.where(is_mass, mass, 1.0)), float("-inf"))
    tl.store(rest + (each * SPLITS + split) * GROUP + member, logarithm, mask=is_member)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        attended / divisor[:, None],
        mask=is_member[:, None] & is_v[None, :],
    )


@triton.jit
def _log_sum(logarithms):
    """The log-sum-exp of the first dimension."""
    highest = tl.max(logarithms, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(logarithms - base[None, :]), 0)
    return tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def _sum_masses(
    lse, rest, shares,
    GROUP: tl.constexpr, PARTS: tl.constexpr, REST: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    each, member = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_GROUP)
    is_member = member < GROUP
    part = tl.arange(0, BLOCK_PARTS)
    is_own = (part < PARTS - REST)[:, None] & is_member[None, :]
    own = tl.load(lse + (each * PARTS + part)[:, None] * GROUP + member[None, :], mask=is_own, other=float("-inf"))
    part = tl.arange(0, REST)
    other = tl.load(
        rest + (each * REST + part)[:, None] * GROUP + member[None, :], mask=is_member[None, :], other=float("-inf")
    )
    attended, estimated = _log_sum(own), _log_sum(other)
    highest = tl.maximum(attended, estimated)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    own = tl.exp(attended - base)
    share = own / (own + tl.exp(estimated - base))
    tl.store(shares + each, tl.sum(tl.where(is_member, share, 0.0), 0) / GROUP)


def attend_to_tokens(
    q: torch.Tensor, keys: Memory, values: Memory, slots: torch.Tensor, counts: torch.Tensor,
    scale: float, softcap: float | None, parts: Parts, offsets: KeyOffsets[Any] | None = None,
) -> None:  # fmt: skip
    """As `gpu_ops.token_attention.attend_to_tokens_in_torch`; all but `q` and offsets is contiguous."""
    _attend(q, keys, values, slots, counts, scale, softcap, parts, SPLITS, TOKEN_PARTS, None, offsets)


def attend_to_stored(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor,
    counts: torch.Tensor, scale: float, softcap: float | None, parts: Parts,
) -> None:  # fmt: skip
    """As `gpu_ops.token_attention.attend_to_stored_in_torch`; all but `q` is contiguous."""
    _attend(q, keys, values, tokens, counts, scale, softcap, parts, SPLITS + TOKEN_PARTS, STORED_PARTS, table, None)


def _attend(
    q: torch.Tensor, keys: Memory, values: Memory, listed: torch.Tensor, counts: torch.Tensor, scale: float,
    softcap: float | None, parts: Parts, first: int, splits: int, table: torch.Tensor | None,
    offsets: KeyOffsets[Any] | None,
) -> None:  # fmt: skip
    """Attend to listed slots, or with a table to listed tokens; receives the parts from `first` on."""
    q = q if q.stride(3) == 1 else q.contiguous()
    (batch, kv_heads, whole, group, v_dim), k_dim = parts.out.shape, q.shape[3]
    k_bits, v_bits = bits_of(keys, k_dim), bits_of(values, v_dim)
    # Without offsets others are named, and not read.
    vectors, tokens, block_size = (keys, listed, 0) if offsets is None else offsets
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    _attend_tokens[(splits, batch * kv_heads)](
        q, pointer(keys), pointer(values), listed, counts, tokens, pointer(vectors), parts.lse, parts.out,
        listed.shape[2], keys.shape[2], scale, softcap or 0.0, kv_heads, *q.stride()[:2],
        listed if table is None else table, vectors.shape[2] if table is None else table.shape[1],
        GROUP=group, K_DIM=k_dim, V_DIM=v_dim, SOFTCAPPED=bool(softcap), PRECISION=precision_of(q), FIRST=first,
        SPLITS=splits, PARTS=whole, K_BITS=k_bits, K_BYTES=GROUP_BYTES.get(k_bits, 0), V_BITS=v_bits,
        V_BYTES=GROUP_BYTES.get(v_bits, 0), OFFSET_TOKENS=block_size, KEY=kind(keys), VALUE=kind(values),
        ALIGNMENT=alignment(keys, values, vectors), STORED=0 if table is None else keys.shape[2],
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        BLOCK_KEYS=max(16, min(64, _TILE_BYTES // (max(block_k, block_v) * q.element_size()))),
        BLOCK_K=block_k, BLOCK_V=block_v, num_stages=2,
    )  # fmt: skip


def attend_to_rest(
    weights: torch.Tensor, masses: torch.Tensor, value_means: Memory, number: torch.Tensor, parts: Parts
) -> torch.Tensor:
    """As `gpu_ops.token_attention.attend_to_rest_in_torch`; a block's mean value is contiguous."""
    batch, kv_heads, whole, group, v_dim = parts.out.shape
    rest = torch.empty(batch, kv_heads, REST_PARTS, group, dtype=torch.float32, device=weights.device)
    bits, block_v = bits_of(value_means, v_dim), max(16, triton.next_power_of_2(v_dim))
    _attend_rest[(REST_PARTS, batch * kv_heads)](
        weights, masses, pointer(value_means), number, parts.lse, parts.out, rest, weights.shape[3], kv_heads,
        *value_means.stride()[:3], step_of(number),
        GROUP=group, V_DIM=v_dim, FIRST=whole - REST_PARTS, SPLITS=REST_PARTS, PARTS=whole, BITS=bits,
        BYTES=GROUP_BYTES.get(bits, 0), PRECISION=precision_of_singles(weights), KIND=kind(value_means),
        ALIGNMENT=alignment(value_means),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        BLOCKS=max(16, min(64, _TILE_BYTES // (4 * block_v))), BLOCK_V=block_v, num_stages=2,
    )  # fmt: skip
    return rest


def sum_masses(lse: torch.Tensor, rest: torch.Tensor, shares: torch.Tensor) -> None:
    """As `gpu_ops.token_attention.sum_masses_in_torch`, for contiguous tensors."""
    batch, kv_heads, parts, group = lse.shape
    _sum_masses[(batch * kv_heads,)](
        lse, rest, shares, GROUP=group, PARTS=parts, REST=rest.shape[2], BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_PARTS=triton.next_power_of_2(parts - rest.shape[2]),
    )  # fmt: skip
