"""The attention of a few queries of a chunk; `gpu_ops.query_scores` defines the results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.triton_kernels.products import multiplies_halves, precision_of
from hetero_kv.gpu_ops.triton_kernels.softcap import LOG2_E, softcapped

# Keys of a program that finds log-sum-exps, whole blocks.
_SHARE = 2048


@triton.jit
def _scores(
    queries, token, position, past_k, k, past, total, pk2, k2, scale, softcap, k_at,
    K_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores in base two of a tile of queries and of the keys at `token`; -inf after a query, or after all keys."""
    place = tl.minimum(token, total - 1)
    at = place.to(tl.int64)
    rows = tl.where(place >= past, k + (at - past) * k2, past_k + at * pk2)
    keys = tl.load(rows[None, :] + k_at[:, None], mask=(k_at < K_DIM)[:, None], other=0.0)
    scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
    if SOFTCAPPED:
        scores = softcapped(scores, softcap)
    return tl.where(token[None, :] <= position[:, None], scores * LOG2_E, float("-inf"))


@triton.jit(do_not_specialize=["first", "past", "total", "count"])
def _logsumexp(
    q, past_k, k, places, out, first, past, total, count, scale, softcap, heads, group,
    q0, q1, q2, pk0, pk1, pk2, k0, k1, k2,
    K_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    split, each = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, head = each // heads, each % heads
    index, k_at = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_K)
    is_query = index < count
    query = tl.load(places + index, mask=is_query, other=0)
    position = first + query
    # No mask: rows of the tile behind the last query repeat the first one, and are not stored.
    queries = tl.load(
        q + row * q0 + head * q1 + query.to(tl.int64)[:, None] * q2 + k_at[None, :],
        mask=(k_at < K_DIM)[None, :],
        other=0.0,
    )
    past_k, k = past_k + row * pk0 + head // group * pk1, k + row * k0 + head // group * k1
    largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_QUERIES], tl.float32)
    for start in range(split * SHARE, tl.minimum((split + 1) * SHARE, tl.max(position, 0) + 1), BLOCK_KEYS):
        scores = _scores(
            queries, start + tl.arange(0, BLOCK_KEYS), position, past_k, k, past, total, pk2, k2, scale, softcap, k_at,
            K_DIM, SOFTCAPPED, PRECISION,
        )  # fmt: skip
        highest = tl.maximum(largest, tl.max(scores, 1))
        # For a query that has seen nothing yet this is exp2(-inf - 0), not exp2(nan).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = weight * tl.exp2(largest - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        largest = highest
    is_some = weight > 0
    logarithm = tl.where(is_some, (largest + tl.log2(tl.where(is_some, weight, 1.0))) / LOG2_E, float("-inf"))
    tl.store(out + (each * tl.num_programs(0) + split) * count + index, logarithm, mask=is_query)


@triton.jit(do_not_specialize=["n", "first", "past", "total", "count"])
def _line_sums(
    q, past_k, k, lse, by_token, by_place, n, first, past, total, count, scale, softcap, heads, group,
    q0, q1, q2, pk0, pk1, pk2, k0, k1, k2,
    K_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of keys against a tile of columns; column c is the query c tokens before the last one."""
    each = tl.program_id(2).to(tl.int64)
    row, head = each // heads, each % heads
    column, k_at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    is_query, query = column < count, n - 1 - column
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries = tl.load(
        q + row * q0 + head * q1 + query.to(tl.int64)[:, None] * q2 + k_at[None, :],
        mask=is_query[:, None] & (k_at < K_DIM)[None, :],
        other=0.0,
    )
    past_k, k = past_k + row * pk0 + head // group * pk1, k + row * k0 + head // group * k1
    scores = _scores(
        queries, token, first + query, past_k, k, past, total, pk2, k2, scale, softcap, k_at,
        K_DIM, SOFTCAPPED, PRECISION,
    )  # fmt: skip
    normaliser = tl.load(lse + each * count + column, mask=is_query, other=0.0) * LOG2_E
    shares = tl.where(is_query[:, None], tl.exp2(scores - normaliser[:, None]), 0.0)
    part = (each * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    tl.store(by_token + part * total + token, tl.sum(shares, 0), mask=token < total)
    # Along a diagonal the distance is the same: row c of the tile moves c places to the right.
    place = tl.arange(0, 2 * BLOCK)
    index = place[None, :] - tl.arange(0, BLOCK)[:, None]
    moved = tl.gather(shares, tl.minimum(tl.maximum(index, 0), BLOCK - 1), 1)
    moved = tl.where((index >= 0) & (index < BLOCK), moved, 0.0)
    written = part * tl.num_programs(0) + tl.program_id(0)
    tl.store(by_place + written * (2 * BLOCK) + place, tl.sum(moved, 0))


@triton.jit(do_not_specialize=["n", "first", "past", "total", "count", "length", "offset_length", "key_blocks"])
def _unseen_logsumexp(
    q, past_k, k, places, is_token, is_offset, out, unseen, n, first, past, total, count, length, offset_length,
    key_blocks, scale, softcap, heads, group, q0, q1, q2, pk0, pk1, pk2, k0, k1, k2,
    K_DIM: tl.constexpr, SOFTCAPPED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, SAMPLES: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_logsumexp`, of `SAMPLES` queries of each query block, and of the keys of each block outside their lines."""
    split, each = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, head = each // heads, each % heads
    index, k_at = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_K)
    is_query, query_blocks = index < count, tl.cdiv(n, BLOCK)
    query = tl.load(places + index, mask=is_query, other=0)
    position, block = first + query, index // SAMPLES
    # No mask: rows of the tile behind the last query repeat the first one, and are not stored.
    queries = tl.load(
        q + row * q0 + head * q1 + query.to(tl.int64)[:, None] * q2 + k_at[None, :],
        mask=(k_at < K_DIM)[None, :],
        other=0.0,
    )
    past_k, k = past_k + row * pk0 + head // group * pk1, k + row * k0 + head // group * k1
    is_token += each * length
    last = first + tl.minimum((block + 1) * BLOCK, n) - 1
    of_block = is_offset + each * offset_length + tl.zeros([BLOCK_QUERIES], tl.int64)
    if RAGGED:
        # The last block has fewer queries, and offsets of its own.
        of_block += tl.where(block == query_blocks - 1, tl.num_programs(2).to(tl.int64) * offset_length, 0)
    largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_QUERIES], tl.float32)
    for start in range(split * SHARE, tl.minimum((split + 1) * SHARE, tl.max(position, 0) + 1), BLOCK):
        free = tl.zeros([BLOCK_QUERIES], tl.float32)
        for part in tl.static_range(BLOCK // BLOCK_KEYS):
            token = start + part * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            scores = _scores(
                queries, token, position, past_k, k, past, total, pk2, k2, scale, softcap, k_at,
                K_DIM, SOFTCAPPED, PRECISION,
            )  # fmt: skip
            is_listed = tl.load(is_token + tl.minimum(token, length - 1)) != 0
            is_near = tl.load(of_block[:, None] + tl.maximum(last[:, None] - token[None, :], 0)) != 0
            highest = tl.maximum(largest, tl.max(scores, 1))
            # For a query that has seen nothing yet this is exp2(-inf - 0), not exp2(nan).
            base = tl.where(highest == float("-inf"), 0.0, highest)
            shrunk, weights = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
            weight = weight * shrunk + tl.sum(weights, 1)
            free = free * shrunk + tl.sum(tl.where(is_listed[None, :] | is_near, 0.0, weights), 1)
            largest = highest
        is_some = free > 0
        logarithm = tl.where(is_some, (largest + tl.log2(tl.where(is_some, free, 1.0))) / LOG2_E, float("-inf"))
        tl.store(unseen + (each * key_blocks + start // BLOCK) * count + index, logarithm, mask=is_query)
    is_some = weight > 0
    logarithm = tl.where(is_some, (largest + tl.log2(tl.where(is_some, weight, 1.0))) / LOG2_E, float("-inf"))
    tl.store(out + (each * tl.num_programs(0) + split) * count + index, logarithm, mask=is_query)


def logsumexp(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, places: torch.Tensor, first: int, scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """As `gpu_ops.query_scores.logsumexp_in_torch`, for tensors with a contiguous last dimension."""
    batch, heads, _, k_dim = q.shape
    past, total, count = past_k.shape[2], past_k.shape[2] + k.shape[2], places.shape[0]
    block_k, queries, keys = _tile(q, k_dim, count)
    splits = triton.cdiv(total, _SHARE)
    parts = torch.empty(batch, heads, splits, count, dtype=torch.float32, device=q.device)
    _logsumexp[(splits, triton.cdiv(count, queries), batch * heads)](
        q, past_k, k, places, parts, first, past, total, count, scale, softcap or 0.0, heads, heads // k.shape[1],
        *q.stride()[:3], *past_k.stride()[:3], *k.stride()[:3],
        K_DIM=k_dim, SOFTCAPPED=bool(softcap), PRECISION=precision_of(q), SHARE=_SHARE, BLOCK_QUERIES=queries,
        BLOCK_KEYS=keys, BLOCK_K=block_k, num_stages=2,
    )  # fmt: skip
    return parts.logsumexp(dim=2)


def line_sums(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, first: int, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `gpu_ops.query_scores.line_sums_in_torch`, for tensors with a contiguous last dimension."""
    (batch, heads, n, k_dim), count, total = q.shape, lse.shape[2], first + q.shape[2]
    block_k, block, _ = _tile(q, k_dim, count)
    columns, tiles = triton.cdiv(count, block), triton.cdiv(total, block)
    by_token = torch.empty(batch, heads, columns, total, dtype=torch.float32, device=q.device)
    by_place = torch.empty(batch, heads, columns, tiles, 2 * block, dtype=torch.float32, device=q.device)
    _line_sums[(tiles, columns, batch * heads)](
        q, past_k, k, lse.contiguous(), by_token, by_place, n, first, past_k.shape[2], total, count, scale,
        softcap or 0.0, heads, heads // k.shape[1], *q.stride()[:3], *past_k.stride()[:3], *k.stride()[:3],
        K_DIM=k_dim, SOFTCAPPED=bool(softcap), PRECISION=precision_of(q), BLOCK=block, BLOCK_K=block_k, num_stages=1,
    )  # fmt: skip
    # A token's place in a column is its own, plus the column: each tile reaches into the next one.
    sums = by_token.new_zeros(batch, heads, (columns + tiles + 1) * block)
    for column in range(columns):
        own, next_one = by_place[:, :, column].split(block, dim=3)
        sums[..., column * block : (column + tiles) * block] += own.flatten(2)
        sums[..., (column + 1) * block : (column + 1 + tiles) * block] += next_one.flatten(2)
    return by_token.sum(dim=2), sums[..., :total].flip(-1)


def unseen_logsumexp(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, places: torch.Tensor, sets: KeySets, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `gpu_ops.query_scores.unseen_logsumexp_in_torch`, for tensors with a contiguous last dimension."""
    batch, heads, _, k_dim = q.shape
    count, total = places.shape[0], past_k.shape[2] + k.shape[2]
    block_k, queries, keys = _tile(q, k_dim, count)
    splits, key_blocks = triton.cdiv(total, _SHARE), triton.cdiv(sets.total, QUERY_BLOCK)
    parts = torch.empty(batch, heads, splits, count, dtype=torch.float32, device=q.device)
    unseen = torch.full((batch, heads, key_blocks, count), float("-inf"), dtype=torch.float32, device=q.device)
    _unseen_logsumexp[(splits, triton.cdiv(count, queries), batch * heads)](
        q, past_k, k, places, sets.tokens, sets.offsets, parts, unseen, sets.n, sets.first, past_k.shape[2], total,
        count, sets.tokens.shape[2], sets.offsets.shape[3], key_blocks, scale, softcap or 0.0, heads,
        heads // k.shape[1], *q.stride()[:3], *past_k.stride()[:3], *k.stride()[:3],
        K_DIM=k_dim, SOFTCAPPED=bool(softcap), RAGGED=len(sets.offsets) > 1, PRECISION=precision_of(q), SHARE=_SHARE,
        BLOCK=QUERY_BLOCK, SAMPLES=count // sets.query_blocks, BLOCK_QUERIES=queries, BLOCK_KEYS=keys,
        BLOCK_K=block_k, num_stages=2,
    )  # fmt: skip
    return parts.logsumexp(dim=2), unseen


def _tile(q: torch.Tensor, k_dim: int, count: int) -> tuple[int, int, int]:
    """Numbers of a padded vector, and queries and keys per tile, for `count` queries; as many queries as keys."""
    block_k = max(16, triton.next_power_of_2(k_dim))
    most = (64 if multiplies_halves(q) else 32), (16 << 10) // (block_k * q.element_size())
    block = max(16, min(*most, triton.next_power_of_2(count)))
    return block_k, block, block
