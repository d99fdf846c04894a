"""Builds prompts of a target length in few tokenisations: estimates, then corrects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetero_kv.errors import HeteroKVError

# Relative error at which to stop: a tenth of the promised error, because tokenising a long prompt is slow.
_CLOSE = 0.001
# The largest relative excess over the target length.
_TOLERATED = 0.01
# Large units miss the length; beyond this relative error some of them are drawn again.
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
    """The prompt `build(units)` whose number of tokens is nearest to `target`.

    Args:
        build: builds the prompt with a number of units; its tokens grow about linearly with them.
        count_tokens: counts a prompt's tokens, including its template and prefix.
        target: tokens.
        task: the task's name, for errors.
        least: the smallest number of units.

    Raises:
        HeteroKVError: `least` units exceed `target`, or all available units are too few for it.
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
    """The units, some of them drawn again, so that they have about `missing` more tokens.

    The number of large units (a pair of UUIDs, a document) alone cannot hit a short prompt's length.

    Args:
        units: the prompt's units.
        missing: tokens, negative for too many.
        target: the prompt's length; nothing changes if less than 0.5 % of it is missing.
        draw: returns another unit, or None if there are no more.
        tokens: counts one unit's tokens.
        tries: how many units to draw for each place, from the last place on.
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
    """The units at which a line through two attempts meets the target; strictly between `low` and `high`."""
    if high is None:
        first = tried[min(tried)]
        slope = (low.tokens - first.tokens) / max(1, low.units - first.units)
        return low.units + max(1, round((target - low.tokens) / slope) if slope > 0 else low.units)
    share = (target - low.tokens) / max(1, high.tokens - low.tokens)
    # With uneven growth a line through the ends approaches from one side only: bisect from the tenth attempt on.
    share = share if len(tried) < 10 else 0.5
    return min(max(low.units + round(share * (high.units - low.units)), low.units + 1), high.units - 1)
