"""Merges one evicted entry per head into the most similar kept one; `gpu_ops.merged_entries` defines the results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096


@triton.jit
def _similarities(
    evicted, kept, out, count, heads, evicted_row, evicted_head, kept_row, kept_head, kept_entry,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(1).to(tl.int64)
    row, head = each // heads, each % heads
    entry, channel = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES), tl.arange(0, BLOCK)
    is_channel = channel < DIM
    is_number = (entry < count)[:, None] & is_channel[None, :]
    one = tl.load(evicted + row * evicted_row + head * evicted_head + channel, mask=is_channel, other=0.0)
    one = one.to(tl.float32)
    at = kept + row * kept_row + head * kept_head + entry[:, None] * kept_entry + channel[None, :]
    keys = tl.load(at, mask=is_number, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(one * one, axis=0)), 1e-12)
    lengths = tl.maximum(tl.sqrt(tl.sum(keys * keys, axis=1)), 1e-12)
    products = tl.sum(keys * one[None, :], axis=1)
    tl.store(out + each * count + entry, products / (length * lengths), mask=entry < count)


@triton.jit
def _blend(
    old, new, at, weight, heads, old_row, old_head, old_entry, new_row, new_head, own,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blend the vector `new`, with `weight`, into the one `at` in `old`: half a merge, of keys or of values."""
    channel = tl.arange(0, BLOCK)
    to = old + own // heads * old_row + own % heads * old_head + at * old_entry + channel
    is_channel = channel < DIM
    before = tl.load(to, mask=is_channel, other=0.0).to(tl.float32)
    joins = tl.load(new + own // heads * new_row + own % heads * new_head + channel, mask=is_channel, other=0.0)
    blended = (2.718281828459045 * before + weight * joins.to(tl.float32)) / (2.718281828459045 + weight)
    # Vectors that nothing joins stay bit-identical.
    tl.store(to, tl.where(weight > 0, blended, before).to(old.dtype.element_ty), mask=is_channel)


@triton.jit
def _merge_one(
    keys, values, evicted_keys, evicted_values, similarities, matches, joins, heads,
    k0, k1, k2, v0, v1, v2, ek0, ek1, ev0, ev1,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    at = tl.load(matches + own)
    weight = tl.where(tl.load(joins + own) != 0, tl.exp(tl.load(similarities + own)), 0.0)
    _blend(keys, evicted_keys, at, weight, heads, k0, k1, k2, ek0, ek1, own, K_DIM, BLOCK_K)
    _blend(values, evicted_values, at, weight, heads, v0, v1, v2, ev0, ev1, own, V_DIM, BLOCK_V)


def similarities(evicted: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """As `gpu_ops.merged_entries.similarities_in_torch`; the last dimensions are contiguous."""
    batch, heads, count, dim = kept.shape
    out = torch.empty(batch, heads, 1, count, dtype=torch.float32, device=kept.device)
    block = triton.next_power_of_2(dim)
    entries = max(1, _ELEMENTS // block)
    _similarities[(triton.cdiv(count, entries), batch * heads)](
        evicted, kept, out, count, heads, *evicted.stride()[:2], *kept.stride()[:3],
        DIM=dim, BLOCK=block, ENTRIES=entries,
    )  # fmt: skip
    return out


def merge_one(
    keys: torch.Tensor, values: torch.Tensor, evicted_keys: torch.Tensor, evicted_values: torch.Tensor,
    similarities: torch.Tensor, matches: torch.Tensor, joins: torch.Tensor,
) -> None:  # fmt: skip
    """As `gpu_ops.merged_entries.merge_one_in_torch`; the last dimensions of vectors are contiguous."""
    batch, heads, _, k_dim = keys.shape
    v_dim = values.shape[3]
    strides = *keys.stride()[:3], *values.stride()[:3], *evicted_keys.stride()[:2], *evicted_values.stride()[:2]
    _merge_one[(batch * heads,)](
        keys, values, evicted_keys, evicted_values, similarities.contiguous(), matches.contiguous(),
        joins.contiguous(), heads, *strides, K_DIM=k_dim, V_DIM=v_dim,
        BLOCK_K=triton.next_power_of_2(k_dim), BLOCK_V=triton.next_power_of_2(v_dim),
    )  # fmt: skip
