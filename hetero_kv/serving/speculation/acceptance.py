"""How often the guesses of a draft were right, by their places in it."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_kv.serving.speculation.draft_length import MOST_GUESSES

# What is assumed of every place at first, and for how many guesses it counts.
_FIRST_ODDS, _FIRST_WEIGHT = 0.7, 3.0
# The weight that earlier guesses keep at each later one in the same place.
_KEPT = 0.93
# How far the odds return to the first ones with each token that was not guessed. Trying again is cheap: the draft model
# then has only some hundred tokens to compute.
_RETURNED = 1 / 256


class Acceptance:
    """The recent acceptance of a sequence's drafts, place by place.

    A place counts only where all guesses before it were right.
    """

    def __init__(self) -> None:
        self._right = [_FIRST_ODDS * _FIRST_WEIGHT] * MOST_GUESSES
        self._seen = [_FIRST_WEIGHT] * MOST_GUESSES
        self._guesses: Sequence[int] = ()
        self._place = 0

    def odds(self, most: int) -> list[float]:
        """For each of the next guesses, at most `most`, the probability that it is right if those before are."""
        return [right / seen for right, seen in zip(self._right[:most], self._seen, strict=False)]

    def guessed(self, guesses: Sequence[int]) -> None:
        """Record the guesses at the next tokens."""
        self._guesses, self._place = guesses, 0

    def add(self, token: int) -> None:
        """Record the sequence's next token."""
        place = self._place
        if place == len(self._guesses):
            self._return()
            return
        is_right = self._guesses[place] == token
        self._right[place] = self._right[place] * _KEPT + is_right
        self._seen[place] = self._seen[place] * _KEPT + 1
        # Nothing is known of the guesses after a wrong one, and the token after the last right one was not guessed.
        self._place = place + 1
        if not is_right:
            self.guessed(())

    def _return(self) -> None:
        for place in range(MOST_GUESSES):
            self._right[place] += (_FIRST_ODDS * _FIRST_WEIGHT - self._right[place]) * _RETURNED
            self._seen[place] += (_FIRST_WEIGHT - self._seen[place]) * _RETURNED
