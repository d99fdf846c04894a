"""How many tokens of a prompt pass at once, beside requests that are being answered."""

from __future__ import annotations

#: The fewest tokens of a part: with fewer, most of the time would go into reading the weights.
LEAST = 32
#: The fewest tokens of a part that passes beside decoded tokens, which read the weights anyway.
LEAST_BESIDE = 8
# Of the target, the share that is planned: one step in a hundred takes a fifth longer than the mean.
_PLANNED = 0.8
#: The most tokens of a small part, which multiplies packed weights and attends to the past where it lies.
SMALL = 64
#: The fewest tokens of a large part. Every part that is not small unpacks all weights: 128 tokens take 1.65 s where 64
#: take 0.62 and 512 take 4.0 (the default model behind 1,024 tokens, AVX2).
LARGE = 512
# Each new measurement's weight in the mean.
_NEWEST = 0.3


class PartSize:
    """Chooses parts of prompts, so that the time between two tokens of other requests stays near a target.

    Args:
        longest_gap_s: the target, seconds.
        alone: tokens of a part while nobody else waits for a token; new requests are admitted between two parts.
    """

    def __init__(self, longest_gap_s: float, alone: int) -> None:
        self._longest_gap_s, self._alone = longest_gap_s, alone
        # Seconds per prompt token and per step of decoding; unknown at first.
        self._token_s: float | None = None
        self._step_s = 0.0

    def of(self, remaining: int, rows: int, beside: bool = False) -> int:
        """Tokens of the next part.

        Args:
            remaining: tokens of the prompt that have not passed.
            rows: requests that wait for a token meanwhile.
            beside: whether a small part passes in one forward with their tokens.
        """
        if not rows:
            return min(remaining, self._alone)
        if self._token_s is None:
            return min(remaining, self._alone, LEAST)
        fitting = int((self._longest_gap_s - self._step_s) / self._token_s)
        if fitting < LARGE:
            fitting = SMALL if fitting >= SMALL else LEAST
            if beside:
                together = int(_PLANNED * self._longest_gap_s / self._token_s)
                fitting = max(LEAST_BESIDE, min(SMALL, together - rows))
        return min(remaining, self._alone, fitting)

    def passed(self, tokens: int, seconds: float) -> None:
        """A part of this many tokens, decoded tokens beside it included, took this long."""
        each = seconds / tokens
        self._token_s = each if self._token_s is None else self._token_s + _NEWEST * (each - self._token_s)

    def decoded(self, seconds: float) -> None:
        """A step of decoding took this long."""
        self._step_s += _NEWEST * (seconds - self._step_s)
