"""Column sums of the attention matrix in one pass; `gpu_ops.column_sums.column_sums_in_torch` defines the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.triton_kernels.products import multiplies_halves, precision_of
from hetero_kv.gpu_ops.triton_kernels.softcap import softcapped


@triton.jit(do_not_specialize=["n", "length", "past"])
def _column_sums(
    q, lse, keys, weights, sums, n, length, past, scale, softcap, kv_heads, group,
    q0, q1, q2, q3, l0, l1, l2, k0, k1, k2, k3,
    DIM: tl.constexpr, HEADS: tl.constexpr, SOFTCAPPED: tl.constexpr, WEIGHTED: tl.constexpr, SQUARED: tl.constexpr,
    WIDENED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A tile of keys against all queries that see them; over `HEADS` heads of a group, each query's maximum counts."""
    first = tl.program_id(0) * BLOCK_KEYS
    key = first + tl.arange(0, BLOCK_KEYS)
    is_key, channel = key < length, tl.arange(0, BLOCK_DIM)
    sets = group // HEADS
    row = (tl.program_id(1) // (kv_heads * sets)).to(tl.int64)
    kv_head = (tl.program_id(1) // sets % kv_heads).to(tl.int64)
    head = kv_head * group + tl.program_id(1) % sets * HEADS
    tile = tl.load(
        keys + row * k0 + kv_head * k1 + channel[:, None] * k3 + key.to(tl.int64)[None, :] * k2,
        mask=(channel < DIM)[:, None] & is_key[None, :],
        other=0.0,
    )
    if WIDENED:
        tile = tile.to(tl.float32)
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    # Start at the first query that sees any of the keys.
    for start in range(tl.maximum(first - past, 0) // BLOCK_QUERIES * BLOCK_QUERIES, n, BLOCK_QUERIES):
        query = start + tl.arange(0, BLOCK_QUERIES)
        is_query, at = query < n, query.to(tl.int64)
        largest = tl.full([BLOCK_QUERIES, BLOCK_KEYS], float("-inf"), tl.float32)
        for other in range(HEADS):
            queries = tl.load(
                q + row * q0 + (head + other) * q1 + at[:, None] * q2 + channel[None, :] * q3,
                mask=is_query[:, None] & (channel < DIM)[None, :],
                other=0.0,
            )
            if WIDENED:
                queries = queries.to(tl.float32)
            scores = tl.dot(queries, tile, input_precision=PRECISION) * scale
            if SOFTCAPPED:
                scores = softcapped(scores, softcap)
            normaliser = tl.load(lse + row * l0 + (head + other) * l1 + at * l2, mask=is_query, other=0.0)
            largest = tl.maximum(largest, scores - normaliser.to(tl.float32)[:, None])
        seen = is_query[:, None] & (key[None, :] <= past + query[:, None])
        probabilities = tl.where(seen, tl.exp(largest), 0.0)
        if SQUARED:
            probabilities = probabilities * probabilities
        if WEIGHTED:
            weight = tl.load(weights + query, mask=is_query, other=0.0).to(tl.float32)
            probabilities = probabilities * weight[:, None]
        total += tl.sum(probabilities, 0)
    tl.store(sums + tl.program_id(1).to(tl.int64) * length + key, total, mask=is_key)


def column_sums(
    q: torch.Tensor,
    lse: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    softcap: float | None,
    weights: torch.Tensor | None,
    squared: bool,
    group_max: bool,
    past: int,
) -> torch.Tensor:
    """As `gpu_ops.column_sums.column_sums_in_torch`, for tensors of any strides but `weights`."""
    batch, heads, n, dim = q.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    sets = 1 if group_max else group
    sums = torch.empty(batch, kv_heads, sets, length, dtype=torch.float32, device=q.device)
    if not sums.numel():
        return sums
    widened = q.dtype != keys.dtype
    block_dim = max(16, triton.next_power_of_2(dim))
    is_fast = multiplies_halves(q) and not widened
    queries, columns = (64, 64) if is_fast and block_dim <= 128 else (32, 32)
    _column_sums[(triton.cdiv(length, columns), batch * kv_heads * sets)](
        q, lse, keys, q if weights is None else weights.contiguous(), sums, n, length, past, scale, softcap or 0.0,
        kv_heads, group, *q.stride(), *lse.stride(), *keys.stride(),
        DIM=dim, HEADS=group // sets, SOFTCAPPED=bool(softcap), WEIGHTED=weights is not None, SQUARED=squared,
        WIDENED=widened, PRECISION=precision_of(sums if widened else q), BLOCK_QUERIES=queries, BLOCK_KEYS=columns,
        BLOCK_DIM=block_dim, num_stages=2,
    )  # fmt: skip
    return sums
