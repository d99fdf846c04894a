"""Chooses as few entries of each list as reach a share; `gpu_ops.token_choice` defines the results.

As on the CPU a threshold is searched bit by bit: the highest key from which on the entries' shares reach the target,
and then, where another number of entries is chosen, the key of the last of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.token_choice import SMALLEST_SHARE, Target
from hetero_kv.gpu_ops.triton_kernels.row_memory import step_of

# Entries per step of a list; a list of no more is read once for both searches.
_ENTRIES = 8192
# Numbers of candidate blocks per program, and of a tile of shares.
_PLACES, _SHARES = 32, 4096
_SMALLEST = tl.constexpr(SMALLEST_SHARE)
# Keys are the bits of numbers up to about 1, plus one; 0 for what is no entry.
_BITS = tl.constexpr(30)


@triton.jit
def sort_keys(keys, index, there):
    found = tl.load(keys + index, mask=index < there, other=0.0)
    return tl.where(index < there, found.to(tl.int32, bitcast=True) + 1, 0)


@triton.jit
def _sum_from(keys, shares, there, lowest, own_keys, own_shares, IS_ONE: tl.constexpr, ENTRIES: tl.constexpr):
    """The sum of the shares of entries whose keys are at least `lowest`."""
    if IS_ONE:
        return tl.sum(tl.where(own_keys >= lowest, own_shares, 0.0), 0)
    found = tl.full([], 0.0, tl.float32)
    for start in range(0, there, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        share = tl.load(shares + index, mask=index < there, other=0.0)
        found += tl.sum(tl.where(sort_keys(keys, index, there) >= lowest, share, 0.0), 0)
    return found


@triton.jit
def number_from(keys, there, lowest, own_keys, IS_ONE: tl.constexpr, ENTRIES: tl.constexpr):
    """How many entries have keys of at least `lowest`, which is above 0."""
    if IS_ONE:
        return tl.sum((own_keys >= lowest).to(tl.int32), 0)
    found = tl.full([], 0, tl.int32)
    for start in range(0, there, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        found += tl.sum((sort_keys(keys, index, there) >= lowest).to(tl.int32), 0)
    return found


@triton.jit(do_not_specialize=["least", "most", "times", "covering", "n", "width"])
def _choose_by_share(
    keys, shares, totals, number, places, place_counts, chosen, counts, taken, lists, n, width, share, least, most,
    times, covering, number0, kv_heads,
    GROUP: tl.constexpr, UNIT: tl.constexpr, LISTED: tl.constexpr, HAS_TARGET: tl.constexpr, MARKS: tl.constexpr,
    IS_ONE: tl.constexpr, BLOCK_GROUP: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    each, member = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_GROUP)
    keys, shares, chosen = keys + each * n, shares + each * n, chosen + each * width
    blocks = tl.load(number + each // kv_heads * number0).to(tl.int32)
    there = blocks * UNIT
    if LISTED:
        places += each * (n // UNIT)
        there = tl.load(place_counts + each) * UNIT
    there = tl.minimum(there, n)
    first = tl.arange(0, ENTRIES)
    own_keys = sort_keys(keys, first, there)
    own_shares = tl.load(shares + first, mask=first < there, other=0.0)

    count, threshold = tl.minimum(most, there), tl.full([], 0, tl.int32)
    is_found = threshold > 0
    if HAS_TARGET:
        every = tl.load(totals + (lists + each) * GROUP + member, mask=member < GROUP, other=0.0)
        around = tl.load(totals + (2 * lists + each) * GROUP + member, mask=member < GROUP, other=float("-inf"))
        needed = share - tl.sum(tl.exp(around - every), 0) / GROUP
        for digit in range(_BITS):
            tried = threshold | (tl.full([], 1, tl.int32) << (_BITS - 1 - digit))
            reached = _sum_from(keys, shares, there, tried, own_keys, own_shares, IS_ONE, ENTRIES)
            threshold = tl.where(reached >= needed, tried, threshold)
        above = number_from(keys, there, threshold + 1, own_keys, IS_ONE, ENTRIES)
        reached = _sum_from(keys, shares, there, threshold + 1, own_keys, own_shares, IS_ONE, ENTRIES)
        # Of equal keys the first ones are taken, until the target is reached.
        equal = tl.full([], 0, tl.int32)
        for start in range(0, tl.where(threshold > 0, there, 0), ENTRIES):
            index = start + first
            part = tl.load(shares + index, mask=index < there, other=0.0)
            part = tl.where(sort_keys(keys, index, there) == threshold, part, 0.0)
            is_equal = (sort_keys(keys, index, there) == threshold).to(tl.int32)
            before = reached + tl.cumsum(part, 0) - part
            equal += tl.sum(tl.where(before < needed, is_equal, 0), 0)
            reached += tl.sum(part, 0)
        fewest = tl.where(needed > 0, above + equal, 0)
        count = tl.minimum(tl.maximum(fewest, least), tl.minimum(most, there))
        is_found = (count == fewest) & (times == 1)
    count = tl.minimum(tl.minimum(count * times, there), width)
    count = tl.where(blocks <= covering, there, count)
    is_found = is_found & (blocks > covering) & (threshold > 0)

    # The key of the last entry, unless it is the one that has been found.
    threshold = tl.where(is_found, threshold, 0)
    for digit in range(tl.where(is_found | (count == 0), 0, _BITS)):
        tried = threshold | (tl.full([], 1, tl.int32) << (_BITS - 1 - digit))
        above = number_from(keys, there, tried, own_keys, IS_ONE, ENTRIES)
        threshold = tl.where(above >= count, tried, threshold)
    threshold = tl.where(count == 0, 0x7FFFFFFE, threshold)
    ties = count - number_from(keys, there, threshold + 1, own_keys, IS_ONE, ENTRIES)
    seen, placed = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, there, ENTRIES):
        index = start + first
        key = sort_keys(keys, index, there)
        is_tie = (key == threshold).to(tl.int32)
        is_taken = (key > threshold) | ((is_tie > 0) & (seen + tl.cumsum(is_tie, 0) <= ties))
        place = placed + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        entry = index
        if LISTED:
            block = tl.load(places + index // UNIT, mask=index < there, other=0)
            entry = block * UNIT + index % UNIT
        tl.store(chosen + place, entry, mask=is_taken)
        if MARKS:
            tl.store(taken + each * n + index, is_taken.to(tl.int8), mask=index < n)
        seen += tl.sum(is_tie, 0)
        placed += tl.sum(is_taken.to(tl.int32), 0)
    if MARKS:
        for start in range(tl.cdiv(there, ENTRIES) * ENTRIES, n, ENTRIES):
            index = start + first
            tl.store(taken + each * n + index, tl.zeros([ENTRIES], tl.int8), mask=index < n)
    for start in range(0, width, ENTRIES):
        place = start + first
        tl.store(chosen + place, tl.full([ENTRIES], -1, tl.int32), mask=(place >= count) & (place < width))
    tl.store(counts + each, count)


@triton.jit
def _leave(
    token_scores, taken, places, totals, weights, masses, counted, lists, n, capacity,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    each, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token, is_place = tl.arange(0, BLOCK_TOKENS), at < n
    place = tl.load(places + each * n + at, mask=is_place, other=-1)
    is_token = is_place[:, None] & (token < TOKENS)[None, :]
    of_tokens = at[:, None] * TOKENS + token[None, :]
    is_taken = tl.load(taken + each * n * TOKENS + of_tokens, mask=is_token, other=0).to(tl.int32)
    count = tl.where(place >= 0, tl.sum(is_taken, 1), 0)
    is_some, remaining = count > 0, (TOKENS - count).to(tl.float32)
    fewer = tl.where(remaining > 0, tl.log(tl.where(remaining > 0, remaining, 1.0) / TOKENS), float("-inf"))
    for member in tl.static_range(GROUP):
        of_query = each * GROUP + member
        total = tl.load(totals + lists * GROUP + of_query)
        score = tl.load(token_scores + of_query * n * TOKENS + of_tokens, mask=is_token, other=float("-inf"))
        left = tl.sum(tl.where(is_taken > 0, 0.0, tl.exp(score - total)), 1)
        is_left = left > _SMALLEST
        mass = tl.where(is_left, total + tl.log(tl.where(is_left, left, 1.0)), float("-inf"))
        to = of_query * capacity + tl.maximum(place, 0)
        weight = tl.load(weights + to, mask=is_place, other=0.0)
        tl.store(weights + to, weight + fewer, mask=is_some)
        tl.store(masses + to, mass, mask=is_some)
    tl.atomic_add(counted + each * 4 + 2, tl.sum(is_some.to(tl.int32), 0))
    tl.atomic_add(counted + each * 4 + 3, tl.sum((is_some & (count == TOKENS)).to(tl.int32), 0))


def choose(
    keys: torch.Tensor, shares: torch.Tensor, totals: torch.Tensor, number: torch.Tensor, unit: int,
    places: torch.Tensor | None, place_counts: torch.Tensor | None, target: Target, chosen: torch.Tensor,
    counts: torch.Tensor, taken: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `gpu_ops.token_choice.choose_in_torch`, for contiguous tensors."""
    (batch, kv_heads, n), group = keys.shape, totals.shape[3]
    entries = min(_ENTRIES, max(16, triton.next_power_of_2(n)))
    _choose_by_share[(batch * kv_heads,)](
        keys, shares, totals, number, number if places is None else places,
        number if place_counts is None else place_counts, chosen, counts, counts if taken is None else taken,
        batch * kv_heads, n, chosen.shape[2], target.share, target.least, target.most, target.times, target.covering,
        step_of(number), kv_heads,
        GROUP=group, UNIT=unit, LISTED=places is not None, HAS_TARGET=target.share > 0, MARKS=taken is not None,
        IS_ONE=n <= entries, BLOCK_GROUP=triton.next_power_of_2(group), ENTRIES=entries, num_warps=16,
    )  # fmt: skip


def leave(
    token_scores: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, totals: torch.Tensor, weights: torch.Tensor,
    masses: torch.Tensor, counted: torch.Tensor,
) -> None:  # fmt: skip
    """As `gpu_ops.token_choice.leave_in_torch`, for contiguous tensors."""
    (batch, kv_heads, group, capacity), n = weights.shape, places.shape[2]
    size = taken.shape[2] // n
    block_tokens = triton.next_power_of_2(size)
    blocks = max(1, min(_PLACES, _SHARES // block_tokens))
    _leave[(triton.cdiv(n, blocks), batch * kv_heads)](
        token_scores, taken, places, totals, weights, masses, counted, batch * kv_heads, n, capacity,
        GROUP=group, TOKENS=size, BLOCKS=blocks, BLOCK_TOKENS=block_tokens,
    )  # fmt: skip
