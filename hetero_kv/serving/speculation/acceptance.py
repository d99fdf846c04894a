"""How often the guesses of a draft were right, by their places in it."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_kv.serving.speculation.draft_length import MOST_GUESSES

# For how many guesses the first odds count, and for how many of a place the odds of all places.
_FIRST_WEIGHT = 3.0
# The weight that earlier guesses keep at each later one in the same place, or in any for the odds of all places.
_KEPT, _KEPT_OF_ALL = 0.93, 0.98
# What a place that was not guessed forgets with each draft: a few wrong guesses must not end longer drafts for good.
_FORGOTTEN_OF_PLACE = 1 / 16
# How far the odds return to the first ones with each token that was not guessed. Trying again is cheap: the draft model
# then has only some hundred tokens to compute.
_RETURNED = 1 / 256


class Acceptance:
    """The recent acceptance of a sequence's drafts, place by place.

    A place counts only where all guesses before it were right. The fewer guesses of a place are known, the more count
    those of all places.

    Args:
        first_odds: what is assumed of every place before its guesses are known.

    Attributes:
        was_wrong: whether a guess of the last draft was.
    """

    def __init__(self, first_odds: float) -> None:
        self._first_right = first_odds * _FIRST_WEIGHT
        self._right_of_all, self._seen_of_all = self._first_right, _FIRST_WEIGHT
        self._right, self._seen = [0.0] * MOST_GUESSES, [0.0] * MOST_GUESSES
        self._guesses: Sequence[int] = ()
        self._place, self.was_wrong = 0, False

    def odds(self, most: int) -> list[float]:
        """For each of the next guesses, at most `most`, the probability that it is right if those before are."""
        assumed = self._right_of_all / self._seen_of_all * _FIRST_WEIGHT
        return [
            (right + assumed) / (seen + _FIRST_WEIGHT)
            for right, seen in zip(self._right[:most], self._seen, strict=False)
        ]

    def guessed(self, guesses: Sequence[int]) -> None:
        """Record the guesses at the next tokens."""
        self._guesses, self._place, self.was_wrong = guesses, 0, False
        if guesses:
            self._forget(len(guesses), _FORGOTTEN_OF_PLACE)

    def add(self, token: int) -> None:
        """Record the sequence's next token."""
        place = self._place
        if place == len(self._guesses):
            self._right_of_all += (self._first_right - self._right_of_all) * _RETURNED
            self._seen_of_all += (_FIRST_WEIGHT - self._seen_of_all) * _RETURNED
            self._forget(0, _RETURNED)
            return
        is_right = self._guesses[place] == token
        self._right[place] = self._right[place] * _KEPT + is_right
        self._seen[place] = self._seen[place] * _KEPT + 1
        self._right_of_all = self._right_of_all * _KEPT_OF_ALL + is_right
        self._seen_of_all = self._seen_of_all * _KEPT_OF_ALL + 1
        # Nothing is known of the guesses after a wrong one, and the token after the last right one was not guessed.
        self._place = place + 1
        if not is_right:
            self._guesses, self._place, self.was_wrong = (), 0, True

    def _forget(self, first: int, share: float) -> None:
        """Let the guesses of the places from `first` on count less by a share."""
        for place in range(first, MOST_GUESSES):
            self._right[place] *= 1 - share
            self._seen[place] *= 1 - share
