"""A decoded token's attention to its window and to the blocks in slots; `gpu_ops.resident_attention` defines it.

Where the token is and what the window holds are numbers on the device: one captured launch serves all tokens. As in
`gpu_ops.triton_kernels.window_step` the keys are divided among programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.row_memory import Memory, RowMemory
from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES, Slots, bits_of
from hetero_kv.gpu_ops.triton_kernels.products import precision_of
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, has_row, kind, pointer, row_of
from hetero_kv.gpu_ops.triton_kernels.softcap import LOG2_E, softcapped
from hetero_kv.gpu_ops.triton_kernels.unpacking import unpacked

# Bytes of a tile of keys; values take as much, and prefetching doubles both.
_TILE_BYTES = 8 << 10


@triton.jit(do_not_specialize=["initial", "ring", "slots"])
def _attend_resident(
    q, k, v, keys, values, ids, slot_keys, slot_values, offsets, numbers, sent_k, sent_v, lse, out, initial, ring,
    slots, scale, softcap, kv_heads, q0, q1, k0, k1, v0, v1, keys0, keys1, values0, values1, numbers0,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, SLOT_TOKENS: tl.constexpr,
    SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr, WINDOW_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, K_BITS: tl.constexpr, K_BYTES: tl.constexpr, V_BITS: tl.constexpr, V_BYTES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SLOT_KEY: tl.constexpr, SLOT_VALUE: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    split, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = each // kv_heads, each % kv_heads
    is_row, numbers = has_row(keys, row, ALIGNMENT), numbers + row * numbers0
    past, local_start = tl.load(numbers), tl.load(numbers + 1)
    k_at, v_at, member = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_GROUP)
    is_k, is_v, is_member = k_at < K_DIM, v_at < V_DIM, member < GROUP
    queries = tl.load(
        q + row * q0 + (head * GROUP + member)[:, None] * q1 + k_at[None, :],
        mask=is_member[:, None] & is_k[None, :],
        other=0.0,
    )
    new_key = tl.load(k + row * k0 + head * k1 + k_at, mask=is_k, other=0.0)
    new_value = tl.load(v + row * v0 + head * v1 + v_at, mask=is_v, other=0.0)
    number: tl.constexpr = q.dtype.element_ty
    keys = row_of(keys, row, keys0, number, ALIGNMENT) + head * keys1
    values = row_of(values, row, values0, number, ALIGNMENT) + head * values1
    ids = row_of(ids, row, kv_heads * slots, tl.int64, ALIGNMENT) + head * slots
    # Slots of the window: the first tokens have their own, the newest ones those of a ring.
    new_slot = tl.where(past < initial, past, initial + (past - initial) % ring)
    if split == 0:
        # Programs that read the slot concurrently substitute the token's own numbers.
        tl.store(keys + new_slot * K_DIM + k_at, new_key, mask=is_k & is_row)
        tl.store(values + new_slot * V_DIM + v_at, new_value, mask=is_v & is_row)
        tl.store(sent_k + each * K_DIM + k_at, new_key.to(tl.float32), mask=is_k)
        tl.store(sent_v + each * V_DIM + v_at, new_value.to(tl.float32), mask=is_v)

    is_window = split < WINDOW_SPLITS
    length = past + 1
    first_count, second = tl.minimum(length, initial), tl.maximum(local_start, initial)
    in_window = first_count + tl.maximum(length - second, 0)
    total = tl.where(is_window, in_window, slots.to(tl.int64) * SLOT_TOKENS)
    total = tl.where(is_row, total, 0)
    part = tl.where(is_window, split, split - WINDOW_SPLITS)
    splits = tl.where(is_window, WINDOW_SPLITS, SPLITS - WINDOW_SPLITS)
    share = tl.cdiv(tl.cdiv(total, splits), BLOCK_KEYS) * BLOCK_KEYS
    of_head = slots.to(tl.int64) * SLOT_TOKENS * (K_DIM if K_BITS == 0 else K_DIM // 32 * K_BYTES)
    slot_keys = row_of(slot_keys, row, kv_heads * of_head, SLOT_KEY, ALIGNMENT) + head * of_head
    of_head = slots.to(tl.int64) * SLOT_TOKENS * (V_DIM if V_BITS == 0 else V_DIM // 32 * V_BYTES)
    slot_values = row_of(slot_values, row, kv_heads * of_head, SLOT_VALUE, ALIGNMENT) + head * of_head
    if HAS_OFFSETS:
        offsets = row_of(offsets, row, kv_heads * slots * K_DIM, tl.float16, ALIGNMENT) + head * slots * K_DIM
    if K_BITS == 0:
        keys = tl.where(is_window, keys, slot_keys)
    if V_BITS == 0:
        values = tl.where(is_window, values, slot_values)
    attended = tl.zeros([BLOCK_GROUP, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    stop = tl.minimum((part + 1) * share, total)
    for start in range(part * share, stop, BLOCK_KEYS):
        index = start + tl.arange(0, BLOCK_KEYS)
        is_key = index < stop
        position = tl.where(index < first_count, index, second + index - first_count)
        in_ring = tl.where(position < initial, position, initial + (position - initial) % ring)
        at = tl.where(is_window, in_ring, index)
        is_new = is_window & (at == new_slot)
        # No load's mask comes from this one, which Triton 3.6 does not compile.
        block = tl.load(ids + index // SLOT_TOKENS, mask=is_key & (split >= WINDOW_SPLITS), other=0)
        is_there, in_slots = is_k[:, None] & is_key[None, :], split >= WINDOW_SPLITS
        tile = tl.load(
            keys + k_at[:, None] + at[None, :] * K_DIM, mask=is_there & (is_window | (K_BITS == 0)), other=0.0
        )
        if K_BITS > 0:
            vectors = slot_keys + at[None, :] * (K_DIM // 32 * K_BYTES)
            own = unpacked(vectors, k_at[:, None], is_there & in_slots, K_BITS, K_BYTES)
            # Added to an offset before it is rounded.
            tile = tl.where(is_window, tile.to(tl.float32), own)
        if HAS_OFFSETS:
            first = index // SLOT_TOKENS * K_DIM
            added = tl.load(offsets + first[None, :] + k_at[:, None], mask=is_there & in_slots, other=0.0)
            tile = tile.to(tl.float32) + added.to(tl.float32)
        tile = tile.to(new_key.dtype)
        tile = tl.where(is_new[None, :], new_key[:, None], tile)
        scores = tl.dot(queries, tile, input_precision=PRECISION) * scale
        if SOFTCAPPED:
            scores = softcapped(scores, softcap)
        scores = tl.where((is_key & (block >= 0))[None, :], scores * LOG2_E, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        # Where all slots of the tile are empty this is exp2(-inf - 0), not exp2(nan).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrunk, weights = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
        weight = weight * shrunk + tl.sum(weights, 1)
        is_there = is_key[:, None] & is_v[None, :]
        tile = tl.load(
            values + at[:, None] * V_DIM + v_at[None, :], mask=is_there & (is_window | (V_BITS == 0)), other=0.0
        )
        if V_BITS > 0:
            vectors = slot_values + at[:, None] * (V_DIM // 32 * V_BYTES)
            own = unpacked(vectors, v_at[None, :], is_there & in_slots, V_BITS, V_BYTES)
            tile = tl.where(is_window, tile, own.to(tile.dtype))
        tile = tl.where(is_new[:, None], new_value[None, :], tile)
        attended = tl.dot(weights.to(tile.dtype), tile, attended * shrunk[:, None], input_precision=PRECISION)
        largest = highest

    is_some = weight > 0
    divisor = tl.where(is_some, weight, 1.0)
    logarithm = tl.where(is_some, (largest + tl.log2(divisor)) / LOG2_E, float("-inf"))
    # The attention of a row without memory is nothing, and finite.
    logarithm = tl.where(is_row | (split > 0), logarithm, 0.0)
    written = (each * PARTS + split) * GROUP + member
    tl.store(lse + written, logarithm, mask=is_member)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        attended / divisor[:, None],
        mask=is_member[:, None] & is_v[None, :],
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[Memory, Memory],
    initial: int,
    ids: Memory,
    slots: Slots[Any],
    numbers: torch.Tensor,
    scale: float,
    softcap: float | None,
    sent: tuple[torch.Tensor, torch.Tensor],
    splits: int,
    further: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gpu_ops.resident_attention.attend_in_torch`; the last dimension of every argument is contiguous."""
    batch, heads, _, k_dim = q.shape
    kv_heads, v_dim, count = k.shape[1], v.shape[3], ids.shape[2]
    group, whole = heads // kv_heads, splits * (2 if count else 1)
    parts = whole + further
    (keys, values), (k_bits, v_bits) = window, (bits_of(slots.keys, k_dim), bits_of(slots.values, v_dim))
    out = torch.empty((batch, kv_heads, parts, group, v_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, kv_heads, parts, group), dtype=torch.float32, device=q.device)
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    whole_row = keys, values, ids, slots.keys, slots.values
    if not count and isinstance(keys, RowMemory):
        # What is not read is in the window, too.
        whole_row = keys, values, keys, keys, values
    offsets = whole_row[2] if slots.offsets is None else slots.offsets
    _attend_resident[(whole, batch * kv_heads)](
        q, k, v, *map(pointer, (*whole_row, offsets)), numbers,
        *sent, lse, out, initial, keys.shape[2] - initial, count, scale, softcap or 0.0, kv_heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        numbers.stride(0) if numbers.dim() > 1 else 0,
        GROUP=group, K_DIM=k_dim, V_DIM=v_dim, SLOT_TOKENS=slots.keys.shape[3], SOFTCAPPED=bool(softcap),
        K_BITS=k_bits, K_BYTES=GROUP_BYTES.get(k_bits, 0), V_BITS=v_bits, V_BYTES=GROUP_BYTES.get(v_bits, 0),
        HAS_OFFSETS=slots.offsets is not None, SLOT_KEY=kind(slots.keys), SLOT_VALUE=kind(slots.values),
        ALIGNMENT=alignment(*whole_row, offsets), PRECISION=precision_of(q), WINDOW_SPLITS=splits, SPLITS=whole,
        PARTS=parts, BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        BLOCK_KEYS=max(16, min(64, _TILE_BYTES // (max(block_k, block_v) * q.element_size()))),
        BLOCK_K=block_k, BLOCK_V=block_v, num_stages=2,
    )  # fmt: skip
    return out, lse
