"""How many tokens of a prompt are computed at once while other requests are being answered."""

from __future__ import annotations

from hetero_kv.serving.turns import NO_OTHERS, Others

#: The fewest tokens of a part: with fewer, most of the time would go into reading the weights.
LEAST = 32
#: The fewest tokens of a part in one forward with decoded tokens, which read the weights anyway.
LEAST_BESIDE = 8
# How much longer than expected one forward in a hundred takes, before any was measured; and its bounds.
_LONGEST, _LONGEST_BOUNDS = 1.25, (1.05, 2.0)
# The share of forwards that may take longer than planned, and how fast the measured quantile follows.
_SELDOM, _FOLLOWS = 0.01, 0.05
#: The most tokens of a small part, which multiplies packed weights and attends to the past in its blocks.
SMALL = 64
#: The same beside decoded tokens, where AMX tiles multiply packed weights: 64 tokens take 0.15 s, 128 take 0.21 and 256
#: take 0.33 (the default model beside four answers, Sapphire Rapids or later).
SMALL_BY_TILES = 512
#: The fewest tokens of a large part. Every part that is not small unpacks all weights: 64 tokens take 0.62 s, 128 take
#: 1.65 and 512 take 4.0 (the default model after 1,024 tokens, AVX2).
LARGE = 512
# Each new measurement's weight in the mean.
_NEWEST = 0.3
# What an earlier forward's weight becomes with every later one, and the spread of tokens that determines a line.
_KEPT, _SPREAD = 0.9, 4.0


class ForwardTimes:
    """The seconds of forwards as a line over their tokens, of which the last ones count most.

    A forward has a time of its own, so that the seconds per token of a small one say too much of a larger one. On a
    busy machine some forwards take much longer than the line says: the 99th percentile is followed too.
    """

    def __init__(self) -> None:
        # Sums over forwards of 1, tokens, seconds, tokens², tokens · seconds.
        self._sums = [0.0] * 5
        #: The 99th percentile of forwards' seconds, as a multiple of what the line says.
        self.longest = _LONGEST

    def add(self, tokens: int, seconds: float) -> None:
        """Record a forward."""
        own, each = self._line()
        if own or each:
            is_longer = seconds > self.longest * (own + each * tokens)
            # Robbins and Monro's estimate of a quantile: a rare step up weighs as much as many small ones down.
            moved = self.longest + _FOLLOWS * (is_longer - _SELDOM)
            self.longest = min(max(moved, _LONGEST_BOUNDS[0]), _LONGEST_BOUNDS[1])
        new = 1, tokens, seconds, tokens * tokens, tokens * seconds
        self._sums = [_KEPT * old + each for old, each in zip(self._sums, new, strict=True)]

    def fitting(self, seconds: float) -> float | None:
        """Tokens of a forward of which one in a hundred takes longer than this; None before the first was recorded."""
        own, each = self._line()
        return (seconds / self.longest - own) / each if each else None

    def _line(self) -> tuple[float, float]:
        """A forward's own seconds, and those per token; 0 before the first one was recorded."""
        count, tokens, total, squares, products = self._sums
        if not total:
            return 0.0, 0.0
        variance = squares - tokens * tokens / count
        if variance > count * _SPREAD**2:
            slope = (products - tokens * total / count) / variance
            own = (total - slope * tokens) / count
            if slope > 0 and own > 0:
                return own, slope
        return 0.0, total / tokens


class PartSize:
    """Chooses the size of parts of prompts, so that the time between two tokens of other requests stays near a target.

    Args:
        longest_gap_s: the target, seconds.
        alone: tokens of a part while no other request waits for a token, and of one that pauses for them.

    Attributes:
        alone: the argument.
    """

    def __init__(self, longest_gap_s: float, alone: int) -> None:
        self._longest_gap_s, self.alone = longest_gap_s, alone
        # Seconds per prompt token and per step of decoding; unknown at first.
        self._token_s: float | None = None
        self._step_s = 0.0
        self._beside = ForwardTimes()

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second; None before the first ones."""
        return 1 / self._token_s if self._token_s else None

    @property
    def decode_s(self) -> float:
        """Seconds of a step of decoding; 0 before the first one."""
        return self._step_s

    def of(
        self, remaining: int, rows: int, beside: bool = False, others: Others = NO_OTHERS, small: int = SMALL,
        waited_s: float = 0.0,
    ) -> int:  # fmt: skip
        """Tokens of the next part.

        Args:
            remaining: tokens of the prompt that have not passed.
            rows: number of requests that wait for a token meanwhile.
            beside: whether a small part is computed in one forward with their tokens.
            others: the work of the other engines of the process.
            small: the most tokens of a small part `beside`.
            waited_s: for how long these requests have waited already, seconds.
        """
        if not rows and not others.rows:
            return min(remaining, self.alone)
        if self._token_s is None:
            return min(remaining, self.alone, LEAST)
        # Between two tokens every engine has its turn, some of them also for a part of a prompt.
        gap = (self._longest_gap_s - others.decode_s) / (1 + others.prompts) - waited_s
        fitting = (gap - (self._step_s if rows else 0.0)) / self._token_s
        if fitting < LARGE:
            fitting = SMALL if fitting >= SMALL else LEAST
            if beside:
                together = self._beside.fitting(gap)
                if together is None:
                    together = gap / self._beside.longest / self._token_s
                fitting = max(LEAST_BESIDE, min(small, int(together) - rows))
        # The target may be infinite.
        return int(min(remaining, self.alone, fitting))

    def passed(self, tokens: int, seconds: float, *, beside: bool = False) -> None:
        """Record that a part of this many tokens took this long; those decoded `beside` it included."""
        if beside:
            self._beside.add(tokens, seconds)
        each = seconds / tokens
        self._token_s = each if self._token_s is None else self._token_s + _NEWEST * (each - self._token_s)

    def decoded(self, seconds: float) -> None:
        """Record that a decode step took this long."""
        self._step_s += _NEWEST * (seconds - self._step_s)
