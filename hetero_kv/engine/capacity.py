"""Capacity: how many more tokens fit, by `max_seq_len` and by the blocks that other sequences leave free."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from hetero_kv.engine.cohort import EqualLengthGroup
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.sequence import Layout
from hetero_kv.engine.store import Store


def room(cohorts: Rows[EqualLengthGroup]) -> int | None:
    """Tokens that every row of these cohorts can still take; None when no layer keeps every token."""
    stored = [cohort for cohort in cohorts if cohort.layouts]
    if not stored:
        return None
    most = min(cohort.store.capacity - cohort.length for cohort in stored)
    for store, layout, sharing in _sharing(stored):
        most = min(most, _fitting(store, layout, sharing, most))
    return most


def require_room(requests: Rows[tuple[EqualLengthGroup, int]]) -> None:
    """Raise CacheFullError unless the new tokens of every row of each cohort fit together."""
    stored = [(cohort, tokens) for cohort, tokens in requests if cohort.layouts]
    for cohort, tokens in stored:
        if cohort.length + tokens > cohort.store.capacity:
            raise _beyond_capacity(cohort, tokens, room([cohort]) or 0)
    tokens_of = {id(cohort): tokens for cohort, tokens in stored}
    for store, layout, sharing in _sharing([cohort for cohort, _ in stored]):
        more = [tokens_of[id(cohort)] for cohort in sharing]
        if _needed(layout, sharing, more) > _spare(store, layout, sharing):
            raise used_up(store, layout, max(more), room(sharing) or 0)


def _beyond_capacity(cohort: EqualLengthGroup, tokens: int, left: int) -> CacheFullError:
    return CacheFullError(
        f"the cache is full: max_seq_len is {cohort.store.capacity} tokens, {cohort.length} are stored and {tokens} "
        f"more were to be added; set max_seq_len to at least {cohort.length + tokens}{_shorter(left)}"
    )


def used_up(store: Store, layout: Layout, tokens: int, left: int) -> CacheFullError:
    """The error for `tokens` tokens without free blocks, when only `left` fit."""
    allocator = store.allocators[layout]
    return CacheFullError(
        f"the blocks that this cache shares with its forks are used up: {tokens} tokens were to be added and the "
        f"{allocator.free_blocks} blocks that are free of {allocator.num_blocks} have room for {left}; reset or "
        f"drop a fork, give the first cache more forks (HeteroCache(model, forks={store.forks + 1})){_shorter(left)}"
    )


def _shorter(left: int) -> str:
    return f", or shorten the input to {left} tokens" if left else ""


def _sharing(cohorts: Rows[EqualLengthGroup]) -> list[tuple[Store, Layout, list[EqualLengthGroup]]]:
    """The layouts whose blocks can run out before the capacity does, with the cohorts that use them."""
    stores = {id(cohort.store): cohort.store for cohort in cohorts if cohort.sequences}
    return [
        (store, layout, [cohort for cohort in cohorts if cohort.store is store])
        for store in stores.values()
        for layout, allocator in store.allocators.items()
        if allocator.is_shared
    ]


def _needed(layout: Layout, cohorts: Rows[EqualLengthGroup], tokens: Rows[int]) -> int:
    """Blocks that the new tokens start, `tokens` in every row of each cohort."""
    return sum(
        len(cohort.sequences)
        * max(0, -(-(cohort.length + more) // layout.block_size) - cohort.sequences[0].tables[layout].num_blocks)
        for cohort, more in zip(cohorts, tokens, strict=True)
    )


def _spare(store: Store, layout: Layout, cohorts: Rows[EqualLengthGroup]) -> int:
    """Blocks that are free for new tokens, after these cohorts have copied the shared blocks that they write to."""
    written = []
    for cohort in cohorts:
        # Written blocks: a partly filled last block, and open blocks whose derived data is private to each sequence.
        first = cohort.sequences[0].tables[layout].length // layout.block_size
        if layout.closes_alone:
            first = min(first, cohort.closed[layout])
        written += [sequence.tables[layout].ids[first:] for sequence in cohort.sequences]
    allocator = store.allocators[layout]
    return allocator.free_blocks - allocator.copies_to_own(np.concatenate(written))


def _fitting(store: Store, layout: Layout, cohorts: Rows[EqualLengthGroup], most: int) -> int:
    """Tokens that every row of these cohorts can still take, at most `most`."""
    spare = _spare(store, layout, cohorts)
    if spare < 0:
        return 0
    fitting, beyond = 0, most + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fits = _needed(layout, cohorts, [middle] * len(cohorts)) <= spare
        fitting, beyond = (middle, beyond) if fits else (fitting, middle)
    return fitting
