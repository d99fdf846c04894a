"""Scores and chooses clusters, and lists the tokens of the best ones; `gpu_ops.cluster_choice` defines the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.cluster_choice import ChosenClusters, ClusterBudget, ListedTokens, empty_choice, empty_lists
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.triton_kernels.products import precision_of_singles
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, kind, pointer, row_of, step_of
from hetero_kv.gpu_ops.triton_kernels.softcap import softcapped
from hetero_kv.gpu_ops.triton_kernels.token_choice import number_from, sort_keys

# Clusters per program that are scored, and per step of a list that is chosen from; tokens per program that are listed.
_SCORED, _ENTRIES, _TOKENS = 32, 8192, 4096
# As in `token_choice`.
_BITS = tl.constexpr(30)


@triton.jit
def _score_clusters(
    q, keys, sizes, number, scores, capacity, kv_heads, scale, softcap,
    q0, q1, keys0, keys1, keys2, sizes0, sizes1, sizes2, number0,
    GROUP: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr, SOFTCAPPED: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, CLUSTERS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    start, list_of = tl.program_id(0) * CLUSTERS, tl.program_id(1).to(tl.int64)
    row, head = list_of // kv_heads, list_of % kv_heads
    column, member, cluster = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_GROUP), start + tl.arange(0, CLUSTERS)
    is_column, is_member, is_there = column < DIM, member < GROUP, cluster < tl.load(number + row * number0) * EACH
    queries = tl.load(
        q + row * q0 + (head * GROUP + member)[:, None] * q1 + column[None, :],
        mask=is_member[:, None] & is_column[None, :],
        other=0.0,
    ).to(tl.float32)
    block, within = (cluster // EACH).to(tl.int64), cluster % EACH
    keys = row_of(keys, row, keys0, KIND, ALIGNMENT) + head * keys1
    at = keys + (block * keys2 + within)[None, :] + column[:, None] * EACH
    tile = tl.load(at, mask=is_column[:, None] & is_there[None, :], other=0.0).to(tl.float32)
    score = tl.dot(queries, tile, input_precision=PRECISION) * scale
    if SOFTCAPPED:
        score = softcapped(score, softcap)
    sizes = row_of(sizes, row, sizes0, tl.float32, ALIGNMENT) + head * sizes1
    size = tl.load(sizes + block * sizes2 + within, mask=is_there, other=0.0)
    is_some = (size > 0) & is_there
    score += tl.log(tl.where(is_some, size, 1.0))[None, :]
    written = (list_of * GROUP + member)[:, None] * capacity + cluster[None, :]
    is_number = is_member[:, None] & (cluster < capacity)[None, :]
    tl.store(scores + written, tl.where(is_some[None, :], score, float("-inf")), mask=is_number)


@triton.jit
def _part_of(total, SHARE: tl.constexpr, NUMBER: tl.constexpr):
    """What a share, or a number, means of `total`: at least one, where there is one."""
    found = tl.full([], NUMBER, tl.int32)
    if SHARE > 0:
        # In double precision, as on the CPU.
        exact = total.to(tl.float64) * tl.full([], SHARE, tl.float64)
        found = exact.to(tl.int32)
        found += (found.to(tl.float64) < exact).to(tl.int32)
    return tl.minimum(tl.maximum(found, 1), total)


@triton.jit
def _threshold(shares, total, count, own_keys, IS_ONE: tl.constexpr, ENTRIES: tl.constexpr):
    """The key of the last of the `count` largest, and how many of its equals are among these."""
    threshold = tl.full([], 0, tl.int32)
    for digit in range(tl.where(count == 0, 0, _BITS)):
        tried = threshold | (tl.full([], 1, tl.int32) << (_BITS - 1 - digit))
        above = number_from(shares, total, tried, own_keys, IS_ONE, ENTRIES)
        threshold = tl.where(above >= count, tried, threshold)
    threshold = tl.where(count == 0, 0x7FFFFFFE, threshold)
    return threshold, count - number_from(shares, total, threshold + 1, own_keys, IS_ONE, ENTRIES)


@triton.jit
def _choose_clusters(
    shares, number, is_exact, estimated, counts, n, width, number0, kv_heads,
    EACH: tl.constexpr, EXACT_SHARE: tl.constexpr, EXACT_NUMBER: tl.constexpr, FURTHER_SHARE: tl.constexpr,
    FURTHER_NUMBER: tl.constexpr, ESTIMATES: tl.constexpr, IS_ONE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    each, first = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES)
    shares, is_exact, estimated = shares + each * n, is_exact + each * n, estimated + each * width
    total = (tl.load(number + each // kv_heads * number0) * EACH).to(tl.int32)
    own_keys = sort_keys(shares, first, total)
    exact, further = _part_of(total, EXACT_SHARE, EXACT_NUMBER), tl.full([], 0, tl.int32)
    if ESTIMATES:
        further = tl.minimum(_part_of(total, FURTHER_SHARE, FURTHER_NUMBER), total - exact)
    lowest, ties = _threshold(shares, total, exact, own_keys, IS_ONE, ENTRIES)
    last, last_ties = lowest, ties
    if ESTIMATES:
        last, last_ties = _threshold(shares, total, exact + further, own_keys, IS_ONE, ENTRIES)
    seen, seen_last, placed = (tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32))
    for start in range(0, total, ENTRIES):
        index = start + first
        key = sort_keys(shares, index, total)
        is_tie, is_last_tie = (key == lowest).to(tl.int32), (key == last).to(tl.int32)
        is_best = (key > lowest) | ((is_tie > 0) & (seen + tl.cumsum(is_tie, 0) <= ties))
        tl.store(is_exact + index, is_best.to(tl.int8), mask=index < total)
        seen += tl.sum(is_tie, 0)
        if ESTIMATES:
            is_next = (key > last) | ((is_last_tie > 0) & (seen_last + tl.cumsum(is_last_tie, 0) <= last_ties))
            is_next = is_next & (is_best == 0)
            place = placed + tl.cumsum(is_next.to(tl.int32), 0) - 1
            tl.store(estimated + place, index, mask=is_next)
            seen_last += tl.sum(is_last_tie, 0)
            placed += tl.sum(is_next.to(tl.int32), 0)
    tl.store(counts + each, further)


@triton.jit
def _is_listed(
    clusters, is_exact, number, token, each, kv_heads, first, blocks, clusters0, clusters1, clusters2, number0,
    SIZE: tl.constexpr, EACH: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Whether these tokens are of clusters that are attended to: 0 or 1."""
    row = each // kv_heads
    is_token = token < tl.load(number + row * number0) * SIZE
    clusters = row_of(clusters, row, clusters0, tl.int32, ALIGNMENT) + each % kv_heads * clusters1
    at = clusters + (token // SIZE).to(tl.int64) * clusters2 + token % SIZE
    # Of no token the first cluster is read.
    cluster = tl.load(at, mask=is_token, other=first) - first
    return tl.load(is_exact + each * blocks * EACH + cluster, mask=is_token, other=0).to(tl.int32)


@triton.jit
def _count_tokens(
    clusters, is_exact, number, parts, kv_heads, first, blocks, clusters0, clusters1, clusters2, number0,
    SIZE: tl.constexpr, EACH: tl.constexpr, ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    part, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * TOKENS + tl.arange(0, TOKENS)
    listed = _is_listed(
        clusters, is_exact, number, token, each, kv_heads, first, blocks, clusters0, clusters1, clusters2, number0,
        SIZE, EACH, ALIGNMENT,
    )  # fmt: skip
    tl.store(parts + each * tl.num_programs(0) + part, tl.sum(listed, 0))


@triton.jit
def _list_tokens(
    clusters, is_exact, number, parts, chosen, counts, beyond, beyond_counts, kv_heads, first, blocks, slots, width,
    clusters0, clusters1, clusters2, number0,
    SIZE: tl.constexpr, EACH: tl.constexpr, ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    part, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    other = tl.arange(0, BLOCK_PARTS)
    of_parts = tl.load(parts + each * tl.num_programs(0) + other, mask=other < tl.num_programs(0), other=0)
    token = part * TOKENS + tl.arange(0, TOKENS)
    listed = _is_listed(
        clusters, is_exact, number, token, each, kv_heads, first, blocks, clusters0, clusters1, clusters2, number0,
        SIZE, EACH, ALIGNMENT,
    )  # fmt: skip
    place = tl.sum(tl.where(other < part, of_parts, 0), 0) + tl.cumsum(listed, 0) - 1
    tl.store(chosen + each * slots + place, token, mask=(listed > 0) & (place < slots))
    tl.store(beyond + each * width + place - slots, token, mask=(listed > 0) & (place >= slots))
    if part == 0:
        total = tl.sum(of_parts, 0)
        tl.store(counts + each, tl.minimum(total, slots))
        tl.store(beyond_counts + each, tl.maximum(total - slots, 0))


def score(
    q: torch.Tensor, keys: Memory, sizes: Memory, number: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """As `gpu_ops.cluster_choice.score_clusters_in_torch`."""
    (batch, heads, _, dim), (_, kv_heads, blocks, _, each) = q.shape, keys.shape
    group, capacity = heads // kv_heads, blocks * each
    scores = torch.empty(batch, kv_heads, group, capacity, dtype=torch.float32, device=q.device)
    _score_clusters[(triton.cdiv(capacity, _SCORED), batch * kv_heads)](
        q, pointer(keys), pointer(sizes), number, scores, capacity, kv_heads, scale, softcap or 0.0, *q.stride()[:2],
        *keys.stride()[:3], *sizes.stride()[:3], step_of(number),
        GROUP=group, DIM=dim, EACH=each, SOFTCAPPED=bool(softcap), PRECISION=precision_of_singles(q), KIND=kind(keys),
        ALIGNMENT=alignment(keys, sizes), BLOCK_GROUP=max(16, triton.next_power_of_2(group)), CLUSTERS=_SCORED,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return scores


def choose(shares: torch.Tensor, number: torch.Tensor, each: int, budget: ClusterBudget) -> ChosenClusters:
    """As `gpu_ops.cluster_choice.choose_clusters_in_torch`, for contiguous shares."""
    batch, kv_heads, n = shares.shape
    found, entries = empty_choice(shares, budget), min(_ENTRIES, max(16, triton.next_power_of_2(n)))
    (exact_share, exact), (further_share, further) = (_share_and_number(part) for part in budget)
    _choose_clusters[(batch * kv_heads,)](
        shares, number, *found, n, found.estimated.shape[2], step_of(number), kv_heads,
        EACH=each, EXACT_SHARE=exact_share, EXACT_NUMBER=exact, FURTHER_SHARE=further_share, FURTHER_NUMBER=further,
        ESTIMATES=budget.estimated > 0, IS_ONE=n <= entries, ENTRIES=entries, num_warps=16,
    )  # fmt: skip
    return found


class Listing(NamedTuple):
    """The two launches that list tokens: counts of parts of the Context, and then the tokens of each part.

    Attributes:
        counting, writing: launch them.
        found: what the second one writes.
    """

    counting: Callable[[], Any]
    writing: Callable[[], Any]
    found: ListedTokens


def listing(
    clusters: Memory, first: int, chosen: ChosenClusters, number: torch.Tensor, slots: int,
    counts: torch.Tensor, beyond_counts: torch.Tensor,
) -> Listing:  # fmt: skip
    """What `list_tokens` launches."""
    batch, kv_heads, blocks, size = clusters.shape
    found = empty_lists((batch, kv_heads), blocks * size, slots, counts, beyond_counts)
    tokens = min(_TOKENS, max(16, triton.next_power_of_2(blocks * size)))
    grid = triton.cdiv(blocks * size, tokens), batch * kv_heads
    parts = torch.empty(batch * kv_heads, grid[0], dtype=torch.int32, device=counts.device)
    of_clusters = pointer(clusters), chosen.is_exact, number, parts
    places = *clusters.stride()[:3], step_of(number)
    each = chosen.is_exact.shape[2] // blocks
    fixed = {"SIZE": size, "EACH": each, "ALIGNMENT": alignment(clusters), "TOKENS": tokens}
    return Listing(
        lambda: _count_tokens[grid](*of_clusters, kv_heads, first, blocks, *places, **fixed),
        lambda: _list_tokens[grid](
            *of_clusters, *found, kv_heads, first, blocks, slots, found.beyond.shape[2], *places, **fixed,
            BLOCK_PARTS=triton.next_power_of_2(grid[0]),
        ),
        found,
    )  # fmt: skip


def list_tokens(
    clusters: Memory, first: int, chosen: ChosenClusters, number: torch.Tensor, slots: int,
    counts: torch.Tensor, beyond_counts: torch.Tensor,
) -> ListedTokens:  # fmt: skip
    """As `gpu_ops.cluster_choice.list_tokens_in_torch`."""
    launches = listing(clusters, first, chosen, number, slots, counts, beyond_counts)
    launches.counting()
    launches.writing()
    return launches.found


def _share_and_number(part: float) -> tuple[float, int]:
    """A share, or 0.0, and a number, or 0."""
    return (part, 0) if isinstance(part, float) else (0.0, int(part))
