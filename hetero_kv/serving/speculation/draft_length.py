"""How many tokens to draft: the number with the most expected tokens per second, by odds and by the cost of rows."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from statistics import median
from threading import Lock

#: The most guesses of one sequence in a forward.
MOST_GUESSES = 12
#: Cost of each further row, as a share of a step with fewer rows, until a step with as many rows was measured.
_FIRST_SHARE = 0.06
# The median is of the latest steps with a number of rows, and needs a few of them: the first one may be an outlier.
_LATEST, _LEAST = 7, 3
# A median is dropped after so many steps without its number of rows: contexts, or the machine's load, have changed.
_FORGOTTEN = 2000
# A draft must promise this many times the tokens per second without one: measurements and odds are not exact.
_LEAST_GAIN = 1.03


class StepCosts:
    """Seconds of a step of decoding by its number of rows, as measured while the engine runs."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        # How many steps were measured, and which of them was the last one of a number of rows.
        self._steps = 0
        self._last: dict[int, int] = {}
        # Forks of a conversation record steps in other threads.
        self._recording = Lock()

    @property
    def is_known(self) -> bool:
        """Whether any number of rows was measured."""
        return bool(self._medians)

    def took(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` rows."""
        with self._recording:
            latest = self._latest.setdefault(rows, deque(maxlen=_LATEST))
            latest.append(seconds)
            if len(latest) >= _LEAST:
                self._medians[rows] = median(latest)
            self._steps += 1
            self._last[rows] = self._steps
            for each in [each for each, step in self._last.items() if self._steps - step > _FORGOTTEN]:
                del self._last[each], self._latest[each]
                self._medians.pop(each, None)

    def line(self, most: int) -> tuple[float | None, float]:
        """Seconds of a step of one row, None if unknown, and those that each further row adds, up to `most` rows."""
        if not self.is_known:
            return None, 0.0
        one = self.of(1)
        return one, max(0.0, self.of(most) - one) / max(1, most - 1)

    def of(self, rows: int) -> float:
        """The seconds of a step of `rows` rows, from the nearest measured numbers of rows.

        At least one number of rows must be measured (`is_known`).
        """
        known = self._medians.copy()
        if rows in known:
            return known[rows]
        below = max((each for each in known if each < rows), default=None)
        above = min((each for each in known if each > rows), default=None)
        if below is None:
            assert above is not None
            return known[above]
        if above is None:
            return known[below] * (1 + _FIRST_SHARE * (rows - below))
        high = max(known[below], known[above])
        return known[below] + (high - known[below]) * (rows - below) / (above - below)


def draft_lengths(costs: StepCosts, odds: Sequence[Sequence[float]], guess_s: Sequence[float]) -> list[int]:
    """How many guesses of each sequence the next step verifies.

    Args:
        odds: of each sequence the probability of each next guess to be right, if those before it are.
        guess_s: of each sequence, the seconds that a guess takes.

    Guesses are added by the probability that they are reached and right, the largest first, and the number is taken
    that gives the most tokens a second.
    """
    rows, lengths = len(odds), [0] * len(odds)
    if not costs.is_known:
        return lengths
    reached = [(-each[0], index) for index, each in enumerate(odds) if each]
    heapq.heapify(reached)
    order: list[int] = []
    expected, seconds_more = float(rows), 0.0
    best, best_length = expected / costs.of(rows) * _LEAST_GAIN, 0
    counts = [0] * rows
    while reached:
        negative, index = heapq.heappop(reached)
        order.append(index)
        counts[index] += 1
        expected -= negative
        seconds_more += guess_s[index]
        rate = expected / (costs.of(rows + len(order)) + seconds_more)
        if rate > best:
            best, best_length = rate, len(order)
        if counts[index] < len(odds[index]):
            heapq.heappush(reached, (negative * odds[index][counts[index]], index))
    for index in order[:best_length]:
        lengths[index] += 1
    return lengths
