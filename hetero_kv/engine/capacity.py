"""Capacity: how many more tokens fit, by `max_seq_len` and by the free blocks."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.sequence import Layout
from hetero_kv.engine.store import Store


def room(groups: Rows[EqualLengthGroup]) -> int | None:
    """Tokens that every row of these groups can still take; None when no layer keeps every token."""
    stored = [group for group in groups if group.layouts]
    if not stored:
        return None
    most = min(group.store.capacity - group.length for group in stored)
    for store, layout, sharing in _sharing(stored):
        most = min(most, _fitting(store, layout, sharing, most))
    return most


def require_room(requests: Rows[tuple[EqualLengthGroup, int]], rows: Rows[slice] = ()) -> None:
    """Raise CacheFullError unless the new tokens of every row of each group fit together.

    Args:
        rows: the rows of the batch that each group has, for the error to name; none where there is only one group.
    """
    stored = [(group, tokens) for group, tokens in requests if group.layouts]
    for index, (group, tokens) in enumerate(requests):
        if group.layouts and group.length + tokens > group.store.capacity:
            raise _beyond_capacity(group, tokens, room([group]) or 0, _named(rows[index]) if len(rows) > 1 else "")
    tokens_of = {id(group): tokens for group, tokens in stored}
    for store, layout, sharing in _sharing([group for group, _ in stored]):
        more = [tokens_of[id(group)] for group in sharing]
        if _needed(layout, sharing, more) > _spare(store, layout, sharing):
            raise blocks_exhausted(store, layout, max(more), room(sharing) or 0)


def _named(rows: slice) -> str:
    """Names rows of a batch, for the middle of a sentence."""
    return f" in row {rows.start}" if rows.stop - rows.start == 1 else f" in rows {rows.start} to {rows.stop - 1}"


def _beyond_capacity(group: EqualLengthGroup, tokens: int, fits: int, where: str) -> CacheFullError:
    return CacheFullError(
        f"the cache is full{where}: max_seq_len is {group.store.capacity} tokens, {group.length} are stored, and "
        f"{tokens} more do not fit; set max_seq_len to at least {group.length + tokens}{_shorter(fits)}"
    )


def blocks_exhausted(store: Store, layout: Layout, tokens: int, fits: int) -> CacheFullError:
    """The error for `tokens` tokens without free blocks, when only `fits` fit."""
    allocator = store.allocators[layout]
    if store.is_common:
        return CacheFullError(
            f"the store of this model's caches is full: {tokens} more tokens do not fit, and the "
            f"{allocator.free_blocks} free blocks of {allocator.num_blocks} have room for {fits}; reset or drop other "
            f"caches, or make the store larger than {store.tokens} tokens{_shorter(fits)}"
        )
    return CacheFullError(
        f"the blocks that this cache shares with its forks are used up: {tokens} more tokens do not fit, and the "
        f"{allocator.free_blocks} free blocks of {allocator.num_blocks} have room for {fits}; reset or drop a fork, "
        f"plan more forks for the first cache (HeteroCache(model, forks={store.forks + 1})){_shorter(fits)}"
    )


def _shorter(fits: int) -> str:
    return f", or shorten the input to {fits} tokens" if fits else ""


def _sharing(groups: Rows[EqualLengthGroup]) -> list[tuple[Store, Layout, list[EqualLengthGroup]]]:
    """The layouts whose blocks can run out before the capacity does, with the groups that use them."""
    stores = {id(group.store): group.store for group in groups if group.sequences}
    return [
        (store, layout, [group for group in groups if group.store is store])
        for store in stores.values()
        for layout, allocator in store.allocators.items()
        if allocator.is_shared or store.is_common
    ]


def _needed(layout: Layout, groups: Rows[EqualLengthGroup], tokens: Rows[int]) -> int:
    """Blocks that the new tokens start, `tokens` in every row of each group."""
    return sum(
        len(group.sequences)
        * max(0, -(-(group.length + more) // layout.block_size) - group.sequences[0].tables[layout].num_blocks)
        for group, more in zip(groups, tokens, strict=True)
    )


def _spare(store: Store, layout: Layout, groups: Rows[EqualLengthGroup]) -> int:
    """Blocks that are free for new tokens, after these groups have copied the shared blocks that they write to."""
    written = []
    for group in groups:
        # Written blocks: a partly filled last block, and open blocks whose derived data is private to each sequence.
        first = group.sequences[0].tables[layout].length // layout.block_size
        if layout.finalizes_per_sequence:
            first = min(first, group.finalized[layout])
        written += [sequence.tables[layout].ids[first:] for sequence in group.sequences]
    allocator = store.allocators[layout]
    return allocator.free_blocks - allocator.copies_to_own(np.concatenate(written))


def _fitting(store: Store, layout: Layout, groups: Rows[EqualLengthGroup], most: int) -> int:
    """Tokens that every row of these groups can still take, at most `most`."""
    spare = _spare(store, layout, groups)
    if spare < 0:
        return 0
    fits, beyond = 0, most + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits = _needed(layout, groups, [middle] * len(groups)) <= spare
        fits, beyond = (middle, beyond) if fits else (fits, middle)
    return fits
