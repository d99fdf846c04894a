"""Kernels for rows that lie anywhere, against themselves for rows side by side; `interpreted_kernels.py` runs this."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hetero_kv.gpu_ops.cluster_choice import ClusterBudget
from hetero_kv.gpu_ops.row_memory import RowMemory
from hetero_kv.gpu_ops.slot_formats import Slots
from hetero_kv.gpu_ops.token_attention import PARTS, KeyOffsets, Parts
from hetero_kv.gpu_ops.token_choice import Target
from hetero_kv.gpu_ops.token_slots import TokenSlots
from hetero_kv.gpu_ops.triton_kernels import (
    block_choice,
    cluster_attention,
    cluster_choice,
    estimated_masses,
    resident_attention,
    resident_slots,
    stored_keys,
    token_attention,
    token_choice,
    token_slots,
)
from hetero_kv.store import storage
from hetero_kv.store.key_codes import encode
from tests.gpu_ops.interpreted_numbers import GENERATOR, random

#: The second of four rows has no memory; the others have Contexts of several lengths, one of none.
LIVE = [0, 2, 3]
NUMBERS = torch.tensor([[200, 150, 21], [0, 0, 0], [19, 0, 0], [95, 40, 7]])
HEADS, GROUP, SIZE, CAPACITY = 3, 2, 16, 30


class Lying:
    """Memory of the live rows: side by side, and each where it happens to be."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.together = rows.clone()
        self._rows = [row.clone() for row in rows]
        first, *others = self._rows
        self.anywhere = RowMemory.of([first, None, *others])

    @property
    def are_equal(self) -> bool:
        """Whether kernels have left the same in both."""
        return all(torch.equal(*pair) for pair in zip(self._rows, self.together, strict=True))


def of_live(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[LIVE].contiguous() for tensor in tensors]


def are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the live rows of `found` are the rows of `expected`."""
    return all(
        torch.equal(mine[LIVE].nan_to_num(nan=7.0), right.nan_to_num(nan=7.0))
        for mine, right in zip(found, expected, strict=True)
    )


def queries(dim: int = 32) -> torch.Tensor:
    return random(4, 1, HEADS * GROUP, dim).transpose(1, 2)


def packed(*shape: int) -> torch.Tensor:
    return storage.Q8_0.encode(random(*shape))


def attended(is_packed: bool, count: int) -> bool:
    """Attention to windows and slots, of which some are empty; that of a row without memory is 0."""
    q, k, v = queries(), *(random(4, 1, HEADS, 32).transpose(1, 2) for _ in range(2))
    window = [Lying(random(3, HEADS, 90, 32)) for _ in range(2)]
    ids = Lying(torch.randint(-3, 20, (3, HEADS, count), generator=GENERATOR))
    blocks = packed if is_packed else random
    slots = [Lying(blocks(3, HEADS, count, SIZE, 32)) for _ in range(2)]
    if is_packed:
        slots.append(Lying(random(3, HEADS, count, 1, 32).half()))
    results = []
    for way, batch in (("anywhere", 4), ("together", 3)):
        token = (q, k, v, NUMBERS) if batch == 4 else of_live(q, k, v, NUMBERS)
        sent = [torch.full((batch, HEADS, 1, 32), torch.nan) for _ in range(2)]
        keys, values, places, *parts = (getattr(each, way) for each in (*window, ids, *slots))
        out, lse = resident_attention.attend(
            *token[:3], (keys, values), 20, places, Slots(*parts), token[3], 0.2, None, (sent[0], sent[1]), 3
        )
        results.append((out, lse, *sent))
    (out, lse, *_), _ = results
    is_nothing = not out[1].any() and bool(lse[1].isfinite().any(dim=1).all())
    return is_nothing and are_equal(*results) and all(each.are_equal for each in window)


def loaded(is_packed: bool) -> bool:
    """Blocks are scored, chosen, placed, divided between the bus and the CPU, and fetched."""
    q, blocks = queries(), packed if is_packed else random
    vectors = Lying(blocks(3, CAPACITY, HEADS, 2, 32).movedim(1, 2))
    ids = Lying(torch.randint(0, 20, (3, HEADS, 1), generator=GENERATOR) + torch.arange(5))
    attended_ids = Lying(torch.zeros(3, HEADS, 5, dtype=torch.int64))
    slots, stored = Lying(blocks(3, HEADS, 5, SIZE, 32)), blocks(50, HEADS, SIZE, 32)
    table = torch.randint(0, 50, (4, CAPACITY), generator=GENERATOR).int()
    results, after = [], []
    for way, batch in (("anywhere", 4), ("together", 3)):
        own_q, number, own_table = (q, NUMBERS[:, 2], table) if batch == 4 else of_live(q, NUMBERS[:, 2], table)
        scores = block_choice.score(own_q, getattr(vectors, way), number, True, 0.2, None, None)
        chosen = block_choice.choose(scores, number, 5, False, False, False)
        missed = torch.full((batch * HEADS,), 9, dtype=torch.int32)
        placed, misses, into = resident_slots.place(getattr(ids, way), chosen, missed)
        listed = torch.full((batch, HEADS, 5), 9, dtype=torch.int32)
        where = placed, misses, into, missed
        early, late = resident_slots.divide(*where, 0.5, getattr(attended_ids, way), listed)
        for part in (early, late):
            resident_slots.fetch(stored, own_table, part, into, getattr(slots, way))
        results.append((chosen, missed.view(batch, HEADS), misses, into, early, late, listed))
        after.append(placed)
    # Side by side they are new memory.
    ids.together = after[1]
    missed, misses, listed = results[0][1], results[0][2], results[0][6]
    is_nothing = not missed[1].any() and bool((misses[1] < 0).all()) and bool((listed[1] < 0).all())
    lying = all(each.are_equal for each in (ids, attended_ids, slots))
    return is_nothing and are_equal(*results) and lying


def single_tokens(by_keys: bool, are_stored: bool) -> bool:
    """Single tokens are scored, chosen, placed, fetched, and attended to, and the rest by mean values.

    are_stored: whether keys are packed differences, and scored as they are stored.
    """
    q = queries()
    keys = random(3, CAPACITY, HEADS, SIZE, 32)
    means = storage.Q8_0.encode(torch.stack([keys.mean(dim=3), keys.std(dim=3, correction=0)], dim=3))
    coarse = encode((keys - storage.Q8_0.decode(means)[:, :, :, :1].float()).flatten(0, 1))
    of_keys = packed(3, CAPACITY, HEADS, SIZE, 32) if are_stored else coarse.view(3, CAPACITY, HEADS, -1)
    codes = Lying(of_keys.movedim(1, 2))
    vectors_added = Lying(random(3, CAPACITY, HEADS, 1, 32).half().movedim(1, 2))
    vectors, value_means = Lying(means.movedim(1, 2)), Lying(packed(3, CAPACITY, HEADS, 32).movedim(1, 2))
    count, capacity = 48, CAPACITY * SIZE
    slots = [Lying(part) for part in TokenSlots.empty(3, HEADS, count, capacity, torch.device("cpu"))]
    stored = [(packed if is_packed else random)(50, HEADS, SIZE, 32) for is_packed in (are_stored, False)]
    kept = [Lying(torch.zeros(3, HEADS, count, each.shape[3], dtype=each.dtype)) for each in stored]
    table = torch.randint(0, 50, (4, CAPACITY), generator=GENERATOR).int()
    outside = random(4, HEADS, 5, GROUP)
    results = []
    for way, batch in (("anywhere", 4), ("together", 3)):
        tensors = q, NUMBERS[:, 2], table, outside
        own_q, number, own_table, around = tensors if batch == 4 else of_live(*tensors)
        known = estimated_masses.score_means(own_q, getattr(vectors, way), number, SIZE, 0.2, None)
        own_codes, added = getattr(codes, way), getattr(vectors_added, way)
        score: Any = partial(estimated_masses.score_codes, own_q, own_codes)
        scoring: tuple[Any, ...] = number, SIZE, known, 0.2, None
        if are_stored:
            score = partial(stored_keys.score_stored_keys, own_q, own_codes, added)
            scoring = number, known, 0.2, None
        if by_keys:
            score(None, *scoring, None)
        totals = estimated_masses.log_totals(known.likely, known.masses, around, number)
        shares = estimated_masses.mean_shares(known.likely, known.masses, totals)
        shapes = (6,), (count,), (), ()
        places, chosen, place_counts, counts = (
            torch.full((batch, HEADS, *shape), -1, dtype=torch.int32) for shape in shapes
        )
        of_blocks, of_tokens = Target(0.5, 1, 6, 1, 0), Target(0.7, 0, count, 1, 0)
        token_choice.choose(*shares, totals, number, 1, None, None, of_blocks, places, place_counts, None)
        token_scores = torch.full((batch, HEADS, GROUP, 6 * SIZE), torch.nan)
        score(places, *scoring, token_scores)
        totals = estimated_masses.log_totals(known.masses, known.masses, around, number)
        _, of_each = estimated_masses.mean_shares(token_scores, token_scores, totals)
        among = places, place_counts
        token_choice.choose(of_each, of_each, totals, number, SIZE, *among, of_tokens, chosen, counts, None)
        missed = torch.full((batch * HEADS,), 9, dtype=torch.int32)
        own_slots = TokenSlots(*(getattr(each, way) for each in slots))
        at, misses, into = token_slots.place(own_slots, chosen, counts, missed)
        for pool, each in zip(stored, kept, strict=True):
            token_slots.fetch(pool, own_table, misses, into, missed, getattr(each, way))
        parts = Parts(
            torch.zeros(batch, HEADS, PARTS, GROUP, 32), torch.full((batch, HEADS, PARTS, GROUP), float("-inf"))
        )
        own_kept = [getattr(each, way) for each in kept]
        offsets = KeyOffsets(added, chosen, SIZE) if are_stored else None
        token_attention.attend_to_tokens(own_q, *own_kept, at, counts, 0.2, None, parts, offsets)
        own_means = getattr(value_means, way)
        rest = token_attention.attend_to_rest(known.weights, known.masses, own_means, number, parts)
        results.append((counts, place_counts, missed.view(batch, HEADS), parts.out, parts.lse, rest))
    counts, missed, out = results[0][0], results[0][2], results[0][3]
    is_nothing = not counts[1].any() and not missed[1].any() and not out[1].any()
    lying = all(each.are_equal for each in (*slots, *kept))
    return is_nothing and bool(counts[LIVE].any()) and are_equal(*results) and lying


def clustered() -> bool:
    """Clusters are scored and chosen, their tokens listed, and the next ones attended to."""
    q, each = queries(), 2
    sizes = Lying(torch.randint(0, 4, (3, CAPACITY, HEADS, each), generator=GENERATOR).float().movedim(1, 2))
    keys = Lying(random(3, CAPACITY, HEADS, 32, each).movedim(1, 2))
    sums = Lying(random(3, CAPACITY, HEADS, each, 32).movedim(1, 2))
    # Of the shorter Context's.
    numbers = torch.randint(0, 7 * each, (3, CAPACITY, HEADS, SIZE), generator=GENERATOR)
    of_tokens, slots = Lying(numbers.int().movedim(1, 2)), 40
    outside, budget, results = random(4, HEADS, 5, GROUP), ClusterBudget(0.3, 0.4), []
    for way, batch in (("anywhere", 4), ("together", 3)):
        own_q, number, around = (q, NUMBERS[:, 2], outside) if batch == 4 else of_live(q, NUMBERS[:, 2], outside)
        scores = cluster_choice.score(own_q, getattr(keys, way), getattr(sizes, way), number, 0.2, None)
        totals = estimated_masses.log_totals(scores, scores, around, number * each)
        shares, _ = estimated_masses.mean_shares(scores, scores, totals)
        best = cluster_choice.choose(shares, number, each, budget)
        counts = [torch.full((batch, HEADS), 9, dtype=torch.int32) for _ in range(2)]
        listed = cluster_choice.list_tokens(getattr(of_tokens, way), 0, best, number, slots, *counts)
        parts = Parts(
            torch.zeros(batch, HEADS, PARTS, GROUP, 32), torch.full((batch, HEADS, PARTS, GROUP), float("-inf"))
        )
        lists = best.estimated, best.counts, parts
        rest = cluster_attention.attend_to_clusters(scores, getattr(sums, way), getattr(sizes, way), *lists)
        is_listed = torch.arange(slots) < listed.counts[..., None]
        results.append((*counts, best.counts, listed.chosen.where(is_listed, -1), rest, parts.out))
    is_nothing = not results[0][0][1].any() and not results[0][2][1].any() and not results[0][5][1].any()
    return is_nothing and bool(results[0][0][LIVE].any()) and are_equal(*results)


#: Plain and packed blocks in so many slots; how tokens are scored.
ATTENDED, LOADED = ((False, 7), (True, 4), (False, 0)), (False, True)
SINGLE = (True, False), (True, True), (False, False)


def of_rows() -> dict[str, dict[str, bool]]:
    """By kernels and case, whether rows that lie anywhere are as rows side by side."""
    found = {f"attended, {is_packed}, {count}": attended(is_packed, count) for is_packed, count in ATTENDED}
    # One of each where there is no argument.
    most = None if sys.argv[1:] else 1
    found |= {f"loaded, {is_packed}": loaded(is_packed) for is_packed in LOADED[:most]}
    found |= {f"single tokens, {each}": single_tokens(*each) for each in SINGLE[: most and 2]}
    return {"rows anywhere": found | {"clustered": clustered()}}
