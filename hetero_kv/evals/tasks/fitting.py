"""Prompts of a wanted length in few tokenisations: estimate, then correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetero_kv.errors import HeteroKVError

# Near enough to stop at; a tenth of what is promised, because tokenising a long prompt takes long.
_CLOSE = 0.001
# A prompt that is longer than asked by more than this is refused.
_TOLERATED = 0.01
# Large units leave a prompt off its length; from here on some of them are drawn anew.
_ADJUSTED = 0.005

_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class Fitted:
    """A prompt: its number of units (words, pairs, ...), its text and its number of tokens."""

    units: int
    text: str
    tokens: int


def fit(
    build: Callable[[int], str], count_tokens: Callable[[str], int], target: int, task: str, least: int = 1
) -> Fitted:
    """The prompt `build(units)` whose tokens come nearest to `target`.

    Args:
        build: the prompt with so many units; its tokens grow about evenly with them.
        count_tokens: tokens of a prompt, all that is put around it included.
        target: tokens.
        task: named in the error.
        least: the fewest units.

    Raises:
        HeteroKVError: `least` units are too many for `target`, or all that there are too few.
    """
    tried: dict[int, Fitted] = {}

    def attempt(units: int) -> Fitted:
        text = build(units)
        tried[units] = Fitted(units, text, count_tokens(text))
        return tried[units]

    low = attempt(least)
    if low.tokens > target * (1 + _TOLERATED):
        raise HeteroKVError(
            f"task {task}: length {target} is too small, its shortest prompt has some {low.tokens} tokens; "
            "give greater --lengths"
        )
    high: Fitted | None = None
    other = attempt(least + max(8, target // 200))
    while True:
        if other.tokens > target:
            high = other
        elif other.units > low.units:
            if high is None and other.text == low.text:
                raise HeteroKVError(
                    f"task {task}: length {target} is too great, its longest prompt has some {low.tokens} tokens; "
                    "give smaller --lengths"
                )
            low = other
        if high is not None and high.units - low.units <= 1:
            break
        if min(abs(one.tokens - target) for one in tried.values()) <= max(1, target * _CLOSE):
            break
        other = attempt(_guess(low, high, target, tried))
    return min(tried.values(), key=lambda one: (abs(one.tokens - target), one.units))


def adjusted(
    units: Sequence[_Unit],
    missing: int,
    target: int,
    draw: Callable[[], _Unit | None],
    tokens: Callable[[_Unit], int],
    tries: int = 16,
) -> list[_Unit]:
    """The units, some replaced by others drawn anew, so that they have about `missing` tokens more.

    Whole units of many tokens (a pair of UUIDs, a document) cannot hit a short prompt's length by their number alone.

    Args:
        units: what the prompt is made of.
        missing: tokens, negative for too many.
        target: the prompt's length; nothing is changed for less than 0.5 % of it.
        draw: another unit, or None when there are no more.
        tokens: of one unit.
        tries: units drawn for each place, from the last on.
    """
    result = list(units)
    for at in reversed(range(len(result))):
        if abs(missing) <= target * _ADJUSTED:
            break
        own = tokens(result[at])
        drawn = [unit for unit in (draw() for _ in range(tries)) if unit is not None]
        still_missing = [missing + own - tokens(unit) for unit in drawn]
        best = min(range(len(drawn)), key=[abs(tokens) for tokens in still_missing].__getitem__, default=None)
        if best is not None and abs(still_missing[best]) < abs(missing):
            result[at], missing = drawn[best], still_missing[best]
    return result


def _guess(low: Fitted, high: Fitted | None, target: int, tried: dict[int, Fitted]) -> int:
    """Where a straight line through two attempts meets the target; strictly between `low` and `high`."""
    if high is None:
        first = tried[min(tried)]
        slope = (low.tokens - first.tokens) / max(1, low.units - first.units)
        return low.units + max(1, round((target - low.tokens) / slope) if slope > 0 else low.units)
    share = (target - low.tokens) / max(1, high.tokens - low.tokens)
    # A line through the ends approaches from one side only where the growth is uneven: halve from the tenth attempt.
    share = share if len(tried) < 10 else 0.5
    return min(max(low.units + round(share * (high.units - low.units)), low.units + 1), high.units - 1)
