"""Attention of a prompt in one pass: causal, windowed, soft-capped, with learned sinks, in any float dtype.

Scores are never stored: a program loads a tile of queries and iterates over the keys that they see, with a running
maximum and sum of exponentials (FlashAttention-2, arXiv:2307.08691, algorithm 1). Keys come from two tensors, those
before the queries and the queries' own, so that nothing is concatenated. `gpu_ops.flash.flash_attention_in_torch`
defines the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.triton_kernels.products import multiplies_halves, precision_of
from hetero_kv.gpu_ops.triton_kernels.softcap import LOG2_E, softcapped


@triton.jit(do_not_specialize=["n", "past", "own", "window"])
def _flash(
    q, past_k, past_v, k, v, sink, out, lse, n, past, own, window, scale, softcap, heads, group,
    q0, q1, q2, q3, pk0, pk1, pk2, pk3, pv0, pv1, pv2, pv3, k0, k1, k2, k3, v0, v1, v2, v3,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    # The last queries see most keys, so they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    kv_head = head // group
    query = first + tl.arange(0, BLOCK_QUERIES)
    is_query, position = query < n, past + query
    k_at, v_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    queries = tl.load(
        q + row * q0 + head * q1 + query.to(tl.int64)[:, None] * q2 + k_at[None, :] * q3,
        mask=is_query[:, None] & (k_at < K_DIM)[None, :],
        other=0.0,
    )
    total = tl.zeros([BLOCK_QUERIES, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_QUERIES], tl.float32)

    # The first position that any query of the tile sees.
    seen_from = 0
    if WINDOWED:
        seen_from = tl.maximum(past + first - window + 1, 0)
    past_first = seen_from // BLOCK_KEYS * BLOCK_KEYS
    past_tiles = tl.cdiv(tl.maximum(past - past_first, 0), BLOCK_KEYS)
    own_first = tl.maximum(seen_from - past, 0) // BLOCK_KEYS * BLOCK_KEYS
    own_stop = tl.minimum(first + BLOCK_QUERIES, own)
    own_tiles = tl.cdiv(tl.maximum(own_stop - own_first, 0), BLOCK_KEYS)
    past_k, past_v = past_k + row * pk0 + kv_head * pk1, past_v + row * pv0 + kv_head * pv1
    k, v = k + row * k0 + kv_head * k1, v + row * v0 + kv_head * v1
    for index in range(past_tiles + own_tiles):
        is_own = index >= past_tiles
        key = tl.where(is_own, own_first + (index - past_tiles) * BLOCK_KEYS, past_first + index * BLOCK_KEYS)
        key = key + tl.arange(0, BLOCK_KEYS)
        is_key, at = key < tl.where(is_own, own_stop, past), key.to(tl.int64)
        place = tl.where(is_own, past, 0) + key
        keys = tl.load(
            tl.where(is_own, k, past_k)
            + k_at[:, None] * tl.where(is_own, k3, pk3)
            + at[None, :] * tl.where(is_own, k2, pk2),
            mask=(k_at < K_DIM)[:, None] & is_key[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if SOFTCAPPED:
            scores = softcapped(scores, softcap)
        seen = is_key[None, :] & (place[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (position[:, None] - place[None, :] < window)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        # For a query that has seen nothing yet this is exp2(-inf - 0), not exp2(nan).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrunk, part = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
        weight = weight * shrunk + tl.sum(part, 1)
        values = tl.load(
            tl.where(is_own, v, past_v)
            + at[:, None] * tl.where(is_own, v2, pv2)
            + v_at[None, :] * tl.where(is_own, v3, pv3),
            mask=is_key[:, None] & (v_at < V_DIM)[None, :],
            other=0.0,
        )
        total = tl.dot(part.to(values.dtype), values, total * shrunk[:, None], input_precision=PRECISION)
        largest = highest

    if HAS_SINK:
        score = tl.load(sink + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(largest, score)
        shrunk = tl.exp2(largest - highest)
        total, weight = total * shrunk[:, None], weight * shrunk + tl.exp2(score - highest)
        largest = highest
    is_some = weight > 0
    divisor = tl.where(is_some, weight, 1.0)
    written = tl.program_id(1).to(tl.int64) * n + query
    logarithm = tl.where(is_some, (largest + tl.log2(divisor)) / LOG2_E, float("-inf"))
    tl.store(lse + written, logarithm, mask=is_query)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        (total / divisor[:, None]).to(out.dtype.element_ty),
        mask=is_query[:, None] & (v_at < V_DIM)[None, :],
    )


def flash_attention(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gpu_ops.flash.flash_attention_in_torch`, for tensors of one dtype and of any strides."""
    batch, heads, n, k_dim = q.shape
    past, own, v_dim = past_k.shape[2], k.shape[2], v.shape[3]
    out = torch.empty(batch, heads, n, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    if n == 0:
        return out, lse
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    precision = precision_of(q)
    queries, keys = tile_of(n, max(block_k, block_v) * q.element_size(), multiplies_halves(q))
    _flash[(triton.cdiv(n, queries), batch * heads)](
        q, past_k, past_v, k, v, q if sink is None else sink, out, lse, n, past, own, window or 0, scale,
        softcap or 0.0, heads, heads // k.shape[1],
        *q.stride(), *past_k.stride(), *past_v.stride(), *k.stride(), *v.stride(),
        K_DIM=k_dim, V_DIM=v_dim, SOFTCAPPED=bool(softcap), WINDOWED=window is not None, HAS_SINK=sink is not None,
        PRECISION=precision, BLOCK_QUERIES=queries, BLOCK_KEYS=keys, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=8 if queries == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out, lse


def tile_of(n: int, width: int, has_tensor_cores: bool) -> tuple[int, int]:
    """Queries and keys per tile, for `n` queries and vectors of `width` bytes.

    Both tiles, the values and the prefetched next tiles fit into the smallest shared memory of supported GPUs: 64 KB,
    and 99 KB from Ampere on.
    """
    query_bytes, key_bytes, most = (32 << 10, 16 << 10, 128) if has_tensor_cores else (16 << 10, 16 << 10, 32)
    queries = max(16, min(most, query_bytes // width, triton.next_power_of_2(n)))
    return queries, max(16, min(most, 64, key_bytes // width))
