"""The tokens that a cascade of sub-caches keeps after a stride (Cascading KV cache, arXiv:2406.17808, algorithm 2).

The newest sub-cache accepts every token. A full sub-cache that accepts an entry offers its oldest entry to the next
sub-cache, which accepts every second offer: sub-cache i accepts at tokens whose number is a multiple of 2^i. A refused
offer competes with that sub-cache's newest entry, and the loser is dropped. While the cascade has capacity, every
sub-cache accepts and nothing is dropped.

So all entries of a sub-cache are older than those of the one before it, and the times of offers depend only on token
numbers. A cascade is therefore a list in the order of positions, cut at fixed indices. A stride passes a sub-cache as a
whole: its circular buffer is a slice that advances by the number of accepted entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sub_cache_sizes(window: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` sub-caches that share `window`, the newest first; the newest take the remainder."""
    size, rest = divmod(window, count)
    return tuple(size + (index < rest) for index in range(count))


def survivors(scores: torch.Tensor, sizes: Sequence[int], sinks: int, first: int) -> torch.Tensor:
    """The entries that remain of a full cascade after the tokens that follow it enter it one by one.

    Args:
        scores: [..., sinks + sum(sizes) + incoming], of the entries in the order of their positions; the later of two
            competing entries wins only with a strictly higher score.
        sizes: number of entries of each sub-cache, the newest first.
        sinks: number of entries in front of the cascade.
        first: number of the first incoming token; the first token after the sinks has number 0.

    Returns [..., sinks + sum(sizes)] int64, ascending indices of the entries that stay.
    """
    cached = scores.shape[-1]
    start = sinks + sum(sizes)
    incoming = cached - start
    if incoming == 1:
        return _all_but_one(scores, sizes, sinks, first)
    indices = torch.arange(cached, device=scores.device).expand(scores.shape)
    start -= sizes[0]
    offered, stay = indices[..., start : start + incoming], indices[..., start + incoming :]
    slices = [stay]
    for level, size in enumerate(sizes[1:], 1):
        own = indices[..., start - size : start]
        start -= size
        # Offers are numbered: even ones are accepted, and each odd one competes with the one before it.
        period = 2 ** (level - 1)
        begin, end = -(-first // period), -(-(first + incoming) // period)
        if begin % 2:
            own, offered = own[..., :-1], torch.cat([own[..., -1:], offered], dim=-1)
        sequence = torch.cat([own, _winners(offered, scores)], dim=-1)
        accepted = -(-end // 2) + (-begin // 2)
        offered, stay = sequence[..., :accepted], sequence[..., accepted:]
        slices.append(stay)
    slices.append(indices[..., :sinks])
    return torch.cat(slices[::-1], dim=-1)


def _winners(indices: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The higher-scored of each pair of consecutive `indices` [..., n]; an index without a partner wins."""
    earlier, later = indices[..., ::2], indices[..., 1::2]
    pairs = later.shape[-1]
    earlier, alone = earlier[..., :pairs], earlier[..., pairs:]
    won = scores.gather(-1, later) > scores.gather(-1, earlier)
    return torch.cat([torch.where(won, later, earlier), alone], dim=-1)


def _all_but_one(scores: torch.Tensor, sizes: Sequence[int], sinks: int, first: int) -> torch.Tensor:
    """`survivors` of one incoming token: each accepting sub-cache passes one entry on, and the last one is dropped or
    competes with the newest of the next sub-cache."""
    accepting = (first & -first).bit_length()
    dropped: torch.Tensor | int = sinks
    if accepting < len(sizes):
        newest = sinks + sum(sizes[accepting:]) - 1
        dropped = newest + (scores[..., newest + 1 : newest + 2] <= scores[..., newest : newest + 1]).long()
    indices = torch.arange(scores.shape[-1] - 1, device=scores.device).expand(*scores.shape[:-1], -1)
    return indices + (indices >= dropped)
