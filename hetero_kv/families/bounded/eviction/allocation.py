"""Sharing a number of entries out to layers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shared_out(total: int, falling: Sequence[float], least: int, most: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to exp(-falling), each from `least` to its `most`, that add up to `total`.

    What is above a layer's `most` goes to the others, in the same proportion. Where all have their `most` and something
    is left, all get the same of it.

    Args:
        total: at least `least` for each.
        falling: the higher, the less; of any size.
        least: what everyone has at least; where one's `most` is below, that.
        most: what is of use to each.
    """
    if sum(most) <= total:
        return [count + (total - sum(most)) // len(most) for count in most]

    def shares(level: float) -> list[float]:
        # The exponent is bounded, because a share beyond any `most` is cut anyway.
        found = (math.exp(min(level - height, 100.0)) for height in falling)
        return [min(top, max(least, share)) for share, top in zip(found, most, strict=True)]

    # The softmax is that level at which the shares add up to the total; with limits there is no closed form.
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
