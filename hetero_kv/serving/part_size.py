"""How many tokens of a prompt are computed at once while other requests are being answered."""

from __future__ import annotations

from hetero_kv.serving.turns import Others

#: The fewest tokens of a part: with fewer, most of the time would go into reading the weights.
LEAST = 32
#: The fewest tokens of a part in one forward with decoded tokens, which read the weights anyway.
LEAST_BESIDE = 8
# The share of the target that is planned: one step in a hundred takes a fifth longer than the mean.
_PLANNED = 0.8
#: The most tokens of a small part, which multiplies packed weights and attends to the past in its blocks.
SMALL = 64
#: The fewest tokens of a large part. Every part that is not small unpacks all weights: 64 tokens take 0.62 s, 128 take
#: 1.65 and 512 take 4.0 (the default model after 1,024 tokens, AVX2).
LARGE = 512
NO_OTHERS = Others()
# Each new measurement's weight in the mean.
_NEWEST = 0.3


class PartSize:
    """Chooses the size of parts of prompts, so that the time between two tokens of other requests stays near a target.

    Args:
        longest_gap_s: the target, seconds.
        alone: tokens of a part while no other request waits for a token; new requests are admitted between two parts.
    """

    def __init__(self, longest_gap_s: float, alone: int) -> None:
        self._longest_gap_s, self._alone = longest_gap_s, alone
        # Seconds per prompt token and per step of decoding; unknown at first.
        self._token_s: float | None = None
        self._step_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second; None before the first ones."""
        return 1 / self._token_s if self._token_s else None

    @property
    def decode_s(self) -> float:
        """Seconds of a step of decoding; 0 before the first one."""
        return self._step_s

    def of(self, remaining: int, rows: int, beside: bool = False, others: Others = NO_OTHERS) -> int:
        """Tokens of the next part.

        Args:
            remaining: tokens of the prompt that have not passed.
            rows: number of requests that wait for a token meanwhile.
            beside: whether a small part is computed in one forward with their tokens.
            others: the work of the other engines of the process.
        """
        if not rows and not others.rows:
            return min(remaining, self._alone)
        if self._token_s is None:
            return min(remaining, self._alone, LEAST)
        # Between two tokens every engine has its turn, some of them also for a part of a prompt.
        gap = (self._longest_gap_s - others.decode_s) / (1 + others.prompts)
        fitting = int((gap - (self._step_s if rows else 0.0)) / self._token_s)
        if fitting < LARGE:
            fitting = SMALL if fitting >= SMALL else LEAST
            if beside:
                together = int(_PLANNED * gap / self._token_s)
                fitting = max(LEAST_BESIDE, min(SMALL, together - rows))
        return min(remaining, self._alone, fitting)

    def passed(self, tokens: int, seconds: float) -> None:
        """Record that a part of this many tokens, including tokens decoded with it, took this long."""
        each = seconds / tokens
        self._token_s = each if self._token_s is None else self._token_s + _NEWEST * (each - self._token_s)

    def decoded(self, seconds: float) -> None:
        """Record that a decode step took this long."""
        self._step_s += _NEWEST * (seconds - self._step_s)
