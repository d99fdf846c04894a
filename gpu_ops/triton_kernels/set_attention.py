"""Sparse attention of a prompt's chunk in one pass; `gpu_ops.set_attention.set_attention_in_torch` defines the result.

A program takes queries of one block and gathers the keys of its set by their positions, in three loops: offsets before
the block's end (slashes, windows and the block's own tokens), then tokens (vertical lines), then blocks of keys. What a
loop has in common with those before it counts once: the masks of the sets tell. The softmax is FlashAttention-2's
(arXiv:2307.08691, algorithm 1). No load's mask comes from another load, which Triton 3.6 does not compile: positions
outside the set are replaced by positions that exist, and their scores are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.triton_kernels.flash import tile_of
from hetero_kv.gpu_ops.triton_kernels.products import multiplies_halves, precision_of
from hetero_kv.gpu_ops.triton_kernels.softcap import LOG2_E, softcapped


@triton.jit
def _attended_tile(
    queries, position, place, is_seen, total, largest, weight, past_k, past_v, k, v, past, pk2, pv2, k2, v2, k_at, v_at,
    scale, softcap, K_DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums, maxima and weights after the keys at `place`, of which `is_seen` belong to the set."""
    is_own, at = place >= past, place.to(tl.int64)
    key_rows = tl.where(is_own, k + (at - past) * k2, past_k + at * pk2)
    value_rows = tl.where(is_own, v + (at - past) * v2, past_v + at * pv2)
    keys = tl.load(key_rows[None, :] + k_at[:, None], mask=(k_at < K_DIM)[:, None], other=0.0)
    scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
    if SOFTCAPPED:
        scores = softcapped(scores, softcap)
    seen = is_seen[None, :] & (place[None, :] <= position[:, None])
    scores = tl.where(seen, scores * LOG2_E, float("-inf"))
    highest = tl.maximum(largest, tl.max(scores, 1))
    # For a query that has seen nothing yet this is exp2(-inf - 0), not exp2(nan).
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrunk, part = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
    weight = weight * shrunk + tl.sum(part, 1)
    values = tl.load(value_rows[:, None] + v_at[None, :], mask=(v_at < V_DIM)[None, :], other=0.0)
    total = tl.dot(part.to(values.dtype), values, total * shrunk[:, None], input_precision=PRECISION)
    return total, highest, weight


@triton.jit(do_not_specialize=["n", "first", "past", "room", "offset_room", "length", "offset_length", "width"])
def _attend_sets(
    q, past_k, past_v, k, v, sink, is_token, is_offset, tokens, token_counts, offsets, offset_counts, blocks,
    block_counts, out, lse, attended, n, first, past, room, offset_room, length, offset_length, width, scale, softcap,
    heads, group, q0, q1, q2, pk0, pk1, pk2, pv0, pv1, pv2, k0, k1, k2, v0, v1, v2,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, HAS_SINK: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    block, each = part * BLOCK_QUERIES // BLOCK, tl.program_id(1).to(tl.int64)
    row, head = each // heads, each % heads
    kv_head = head // group
    query = part * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query, position = query < n, first + query
    query_blocks = tl.cdiv(n, BLOCK)
    stop = first + tl.minimum((block + 1) * BLOCK, n)
    k_at, v_at, in_tile = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_KEYS)
    queries = tl.load(
        q + row * q0 + head * q1 + query.to(tl.int64)[:, None] * q2 + k_at[None, :],
        mask=is_query[:, None] & (k_at < K_DIM)[None, :],
        other=0.0,
    )
    past_k, past_v = past_k + row * pk0 + kv_head * pk1, past_v + row * pv0 + kv_head * pv1
    k, v = k + row * k0 + kv_head * k1, v + row * v0 + kv_head * v1
    lists, item = tl.num_programs(1).to(tl.int64), each * query_blocks + block
    tokens, is_token = tokens + each * room, is_token + each * length
    offsets, is_offset = offsets + each * offset_room, is_offset + each * offset_length
    if RAGGED:
        # The last block has fewer queries, and offsets of its own.
        is_last = block == query_blocks - 1
        offsets += tl.where(is_last, lists * offset_room, 0)
        is_offset += tl.where(is_last, lists * offset_length, 0)
    total = tl.zeros([BLOCK_QUERIES, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_QUERIES], tl.float32)
    count = tl.zeros([BLOCK_KEYS], tl.int32)

    # What a list has beyond the block's count is outside of what the block sees.
    for start in range(0, tl.load(offset_counts + item), BLOCK_KEYS):
        place = stop - 1 - tl.load(offsets + start + in_tile)
        is_seen = place >= 0
        count += is_seen.to(tl.int32)
        total, largest, weight = _attended_tile(
            queries, position, tl.maximum(place, 0), is_seen, total, largest, weight, past_k, past_v, k, v, past,
            pk2, pv2, k2, v2, k_at, v_at, scale, softcap, K_DIM, V_DIM, SOFTCAPPED, PRECISION,
        )  # fmt: skip
    for start in range(0, tl.load(token_counts + item), BLOCK_KEYS):
        listed = tl.load(tokens + start + in_tile)
        place = tl.minimum(listed, stop - 1)
        is_again = tl.load(is_offset + (stop - 1 - place)) != 0
        is_seen = (listed < stop) & (is_again == 0)
        count += is_seen.to(tl.int32)
        total, largest, weight = _attended_tile(
            queries, position, place, is_seen, total, largest, weight, past_k, past_v, k, v, past,
            pk2, pv2, k2, v2, k_at, v_at, scale, softcap, K_DIM, V_DIM, SOFTCAPPED, PRECISION,
        )  # fmt: skip
    for index in range(0, tl.load(block_counts + item) * (BLOCK // BLOCK_KEYS)):
        number = tl.load(blocks + item * width + index // (BLOCK // BLOCK_KEYS))
        listed = number * BLOCK + index % (BLOCK // BLOCK_KEYS) * BLOCK_KEYS + in_tile
        place = tl.minimum(listed, stop - 1)
        is_again = (tl.load(is_offset + (stop - 1 - place)) != 0) | (tl.load(is_token + place) != 0)
        is_seen = (listed < stop) & (is_again == 0)
        count += is_seen.to(tl.int32)
        total, largest, weight = _attended_tile(
            queries, position, place, is_seen, total, largest, weight, past_k, past_v, k, v, past,
            pk2, pv2, k2, v2, k_at, v_at, scale, softcap, K_DIM, V_DIM, SOFTCAPPED, PRECISION,
        )  # fmt: skip

    if HAS_SINK:
        score = tl.load(sink + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(largest, score)
        shrunk = tl.exp2(largest - highest)
        total, weight = total * shrunk[:, None], weight * shrunk + tl.exp2(score - highest)
        largest = highest
    # Every query sees itself, but rows of the tile behind the last query see nothing.
    divisor = tl.where(weight > 0, weight, 1.0)
    written = each * n + query
    tl.store(lse + written, (largest + tl.log2(divisor)) / LOG2_E, mask=is_query)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        (total / divisor[:, None]).to(out.dtype.element_ty),
        mask=is_query[:, None] & (v_at < V_DIM)[None, :],
    )
    # All programs of a block count the same.
    tl.store(attended + item, tl.sum(count, 0))


def set_attention(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sets: KeySets,
    scale: float,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `gpu_ops.set_attention.set_attention_in_torch`, for tensors of one dtype with a contiguous last dimension."""
    batch, heads, n, k_dim = q.shape
    past, v_dim = past_k.shape[2], v.shape[3]
    out = torch.empty(batch, heads, n, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    attended = torch.empty(batch, heads, sets.query_blocks, dtype=torch.int32, device=q.device)
    tokens, offsets = sets.token_lists(), sets.offset_lists()
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    queries, keys = tile_of(n, max(block_k, block_v) * q.element_size(), multiplies_halves(q))
    queries = min(queries, QUERY_BLOCK)
    _attend_sets[(triton.cdiv(n, queries), batch * heads)](
        q, past_k, past_v, k, v, q if sink is None else sink, sets.tokens, sets.offsets, tokens.numbers,
        tokens.counts.contiguous(), offsets.numbers, offsets.counts.contiguous(), sets.blocks, sets.counts, out, lse,
        attended, n, sets.first, past, tokens.numbers.shape[3], offsets.numbers.shape[3], sets.tokens.shape[2],
        sets.offsets.shape[3], sets.blocks.shape[3], scale,
        softcap or 0.0, heads, heads // k.shape[1], *q.stride()[:3], *past_k.stride()[:3], *past_v.stride()[:3],
        *k.stride()[:3], *v.stride()[:3],
        K_DIM=k_dim, V_DIM=v_dim, SOFTCAPPED=bool(softcap), HAS_SINK=sink is not None, RAGGED=len(sets.offsets) > 1,
        PRECISION=precision_of(q), BLOCK=QUERY_BLOCK, BLOCK_QUERIES=queries, BLOCK_KEYS=keys, BLOCK_K=block_k,
        BLOCK_V=block_v, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, lse, attended
