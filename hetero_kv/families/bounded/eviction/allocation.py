"""Allocation of a total number of entries to layers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shared_out(total: int, falling: Sequence[float], least: int, most: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to exp(-falling), each between `least` and its `most`, that sum to `total`.

    What exceeds a layer's `most` goes to the others, in the same proportion. If all have their `most`, each gets an
    equal part of the remainder.

    Args:
        total: at least `least` for each.
        falling: one number per layer, of any size; a higher one gets less.
        least: the minimum for each; where a layer's `most` is lower, that is its minimum.
        most: how many each can use.
    """
    if sum(most) <= total:
        return [count + (total - sum(most)) // len(most) for count in most]

    def shares(level: float) -> list[float]:
        # The exponent is bounded: shares beyond any `most` are cut anyway.
        found = (math.exp(min(level - height, 100.0)) for height in falling)
        return [min(top, max(least, share)) for share, top in zip(found, most, strict=True)]

    # The softmax is the level at which the shares sum to the total; with limits there is no closed form.
    low, high = min(falling), max(falling) + math.log(max(most)) + 1.0
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if sum(shares(level)) <= total else (low, level)
    found = shares(low)
    counts = [math.floor(share) for share in found]
    by_rest = sorted(range(len(found)), key=lambda index: counts[index] - found[index])
    for index in [index for index in by_rest if counts[index] < most[index]][: total - sum(counts)]:
        counts[index] += 1
    return counts
