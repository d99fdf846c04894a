"""A decoded token's two launches around the CPU's attention; `gpu_ops.window_step` defines their results.

The window's keys are divided among programs (split-KV, Flash-Decoding), because one query is too little work for a GPU.
Their attention is merged after the CPU's. Scores are never stored, as in `gpu_ops.triton_kernels.flash`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.triton_kernels.products import precision_of
from hetero_kv.gpu_ops.triton_kernels.softcap import LOG2_E, softcapped

# Bytes of a tile of keys; values take as much, and prefetching doubles both.
_TILE_BYTES = 8 << 10


@triton.jit(do_not_specialize=["slot", "first", "first_count", "second", "total", "share"])
def _take_token(
    q, k, v, keys, values, sent_q, sent_k, sent_v, sent_lse, out, slot, first, first_count, second, total, share,
    scale, softcap, kv_heads, q0, q1, k0, k1, v0, v1, keys0, keys1, values0, values1,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    split, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = each // kv_heads, each % kv_heads
    k_at, v_at, member = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_GROUP)
    is_k, is_v, is_member = k_at < K_DIM, v_at < V_DIM, member < GROUP
    is_query = is_member[:, None] & is_k[None, :]
    queries = tl.load(q + row * q0 + (head * GROUP + member)[:, None] * q1 + k_at[None, :], mask=is_query, other=0.0)
    new_key = tl.load(k + row * k0 + head * k1 + k_at, mask=is_k, other=0.0)
    new_value = tl.load(v + row * v0 + head * v1 + v_at, mask=is_v, other=0.0)
    keys, values = keys + row * keys0 + head * keys1, values + row * values0 + head * values1
    if split == 0:
        # Programs that read the slot concurrently substitute the token's own numbers.
        tl.store(keys + slot.to(tl.int64) * K_DIM + k_at, new_key, mask=is_k)
        tl.store(values + slot.to(tl.int64) * V_DIM + v_at, new_value, mask=is_v)
        tl.store(
            sent_q + (each * GROUP + member)[:, None] * K_DIM + k_at[None, :], queries.to(tl.float32), mask=is_query
        )
        tl.store(sent_k + each * K_DIM + k_at, new_key.to(tl.float32), mask=is_k)
        tl.store(sent_v + each * V_DIM + v_at, new_value.to(tl.float32), mask=is_v)

    attended = tl.zeros([BLOCK_GROUP, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    stop = tl.minimum((split + 1) * share, total)
    for start in range(split * share, stop, BLOCK_KEYS):
        index = start + tl.arange(0, BLOCK_KEYS)
        is_key = index < stop
        at = tl.where(index < first_count, first + index, second + index - first_count).to(tl.int64)
        is_new = at == slot
        tile = tl.load(keys + k_at[:, None] + at[None, :] * K_DIM, mask=is_k[:, None] & is_key[None, :], other=0.0)
        tile = tl.where(is_new[None, :], new_key[:, None], tile)
        scores = tl.dot(queries, tile, input_precision=PRECISION) * scale
        if SOFTCAPPED:
            scores = softcapped(scores, softcap)
        scores = tl.where(is_key[None, :], scores * LOG2_E, float("-inf"))
        # A tile has at least one key.
        highest = tl.maximum(largest, tl.max(scores, 1))
        shrunk, part = tl.exp2(largest - highest), tl.exp2(scores - highest[:, None])
        weight = weight * shrunk + tl.sum(part, 1)
        tile = tl.load(values + at[:, None] * V_DIM + v_at[None, :], mask=is_key[:, None] & is_v[None, :], other=0.0)
        tile = tl.where(is_new[:, None], new_value[None, :], tile)
        attended = tl.dot(part.to(tile.dtype), tile, attended * shrunk[:, None], input_precision=PRECISION)
        largest = highest

    is_some = weight > 0
    divisor = tl.where(is_some, weight, 1.0)
    logarithm = tl.where(is_some, (largest + tl.log2(divisor)) / LOG2_E, float("-inf"))
    written = (each * SPLITS + split) * GROUP + member
    tl.store(sent_lse + written, logarithm, mask=is_member)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        attended / divisor[:, None],
        mask=is_member[:, None] & is_v[None, :],
    )


@triton.jit
def _join_parts(
    parts, lse_of_parts, other, other_lse, out, lse,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, HAS_OTHER: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    each, member = head // GROUP, head % GROUP
    column, split = tl.arange(0, BLOCK_DIM), tl.arange(0, SPLITS)
    is_column = column < DIM
    at = (each * SPLITS + split) * GROUP + member
    logarithms = tl.load(lse_of_parts + at)
    # The window contains the token itself, so the maximum is finite.
    highest = tl.max(logarithms, 0)
    if HAS_OTHER:
        another = tl.load(other_lse + head)
        highest = tl.maximum(highest, another)
    weights = tl.exp(logarithms - highest)
    total = tl.sum(weights, 0)
    tile = tl.load(parts + at[:, None] * DIM + column[None, :], mask=is_column[None, :], other=0.0)
    joined = tl.sum(tile * weights[:, None], 0)
    if HAS_OTHER:
        weight = tl.exp(another - highest)
        total += weight
        joined += tl.load(other + head * DIM + column, mask=is_column, other=0.0) * weight
    tl.store(out + head * DIM + column, (joined / total).to(out.dtype.element_ty), mask=is_column)
    tl.store(lse + head, highest + tl.log(total))


def take_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: int,
    runs: tuple[int, int, int, int],
    scale: float,
    softcap: float | None,
    sent: tuple[torch.Tensor, ...],
    splits: int,
) -> torch.Tensor:
    """As `gpu_ops.window_step.take_token_in_torch`; the last dimension of every argument is contiguous."""
    batch, heads, _, k_dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[3]
    group, (first, first_count, second, second_count) = heads // kv_heads, runs
    out = torch.empty((batch, kv_heads, splits, group, v_dim), dtype=torch.float32, device=q.device)
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    tile = max(16, min(64, _TILE_BYTES // (max(block_k, block_v) * q.element_size())))
    total = first_count + second_count
    _take_token[(splits, batch * kv_heads)](
        q, k, v, keys, values, *sent, out, slot, first, first_count, second, total,
        triton.cdiv(triton.cdiv(total, splits), tile) * tile, scale, softcap or 0.0, kv_heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        GROUP=group, K_DIM=k_dim, V_DIM=v_dim, SOFTCAPPED=bool(softcap), PRECISION=precision_of(q), SPLITS=splits,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCK_KEYS=tile, BLOCK_K=block_k, BLOCK_V=block_v,
        num_stages=2,
    )  # fmt: skip
    return out


def join_parts(
    parts: torch.Tensor,
    lse_of_parts: torch.Tensor,
    other: torch.Tensor | None,
    other_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """As `gpu_ops.window_step.join_parts_in_torch`, for contiguous arguments."""
    batch, kv_heads, splits, group, dim = parts.shape
    has_other = other is not None
    _join_parts[(batch * kv_heads * group,)](
        parts, lse_of_parts, other if has_other else parts, other_lse if has_other else parts, out, lse,
        GROUP=group, DIM=dim, SPLITS=splits, HAS_OTHER=has_other, BLOCK_DIM=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
