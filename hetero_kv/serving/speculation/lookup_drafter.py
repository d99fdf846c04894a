"""Drafts by lookup: the longest suffix of a sequence that also occurs earlier in it is continued as there.

Prompt lookup (Saxena 2023), with the choice among several places of REST (He et al. 2023, arXiv:2311.08252): the place
with the longest common suffix counts, among equals the last one. Every token of the answer, drafted or not, shows
whether the lookup was right, so that the odds of a guess cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Tokens of the hashed n-grams, the longer tried first.
GRAMS = (6, 2)
# The largest number of earlier places of an n-gram that are compared.
_PLACES = 16
#: Common suffixes of more tokens count as this long.
LONGEST = 32
# The first odds that the next token is right, by length of the common suffix (2, 3, 5, 9, 17 and 32 tokens or more).
_LEAST = (2, 3, 5, 9, 17, 32)
_FIRST_ODDS = (0.25, 0.35, 0.5, 0.65, 0.8, 0.9)
# How many tokens these count for, and the weight that earlier tokens keep at each later one.
_FIRST_WEIGHT = 3.0
_KEPT = 0.93
# Of the hashes, which are polynomials of an n-gram's tokens in 64 bits.
_FACTOR, _ALL_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


class LookupDrafter:
    """Guesses the next tokens of one sequence, in microseconds per token at any length.

    Args:
        tokens: the prompt's, including documents.
    """

    #: Seconds that a guess takes: negligible compared with a forward.
    guess_s = 0.0

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        numbers = np.array(self._tokens, dtype=np.uint64)
        self._tables = [_Places(self._tokens, numbers, size) for size in GRAMS]
        self._right = [odds * _FIRST_WEIGHT for odds in _FIRST_ODDS]
        self._seen = [_FIRST_WEIGHT] * len(_FIRST_ODDS)
        # The place of the next token in the earlier text (0: none), and the length of the common suffix before it.
        self._next, self._common = 0, 0
        self._look_up()

    def add(self, token: int) -> None:
        """Record the sequence's next token."""
        tokens = self._tokens
        is_right = bool(self._next) and tokens[self._next] == token
        if self._next:
            length = _class_of(self._common)
            self._right[length] = self._right[length] * _KEPT + is_right
            self._seen[length] = self._seen[length] * _KEPT + 1
        tokens.append(token)
        for table in self._tables:
            table.add(len(tokens))
        if is_right:
            self._next, self._common = self._next + 1, min(self._common + 1, LONGEST)
        else:
            self._look_up()

    def odds(self, most: int) -> list[float]:
        """For each of the next guesses, at most `most`, the probability that it is right if those before are."""
        if not self._next:
            return []
        classes = [_class_of(min(self._common + index, LONGEST)) for index in range(most)]
        return [self._right[each] / self._seen[each] for each in classes]

    def guesses(self, count: int) -> list[int]:
        """The next `count` guesses, for which there were odds."""
        tokens, place, end = self._tokens, self._next, len(self._tokens)
        found: list[int] = []
        for index in range(place, place + count):
            # A guess beyond the known text repeats the guesses.
            found.append(tokens[index] if index < end else found[index - end])
        return found

    def release(self) -> None:
        """See `Drafter`; nothing to free."""

    def _look_up(self) -> None:
        tokens = self._tokens
        self._next = self._common = 0
        for table in self._tables:
            for place in table.before(len(tokens)):
                common = _common_end(tokens, place, len(tokens))
                if common > self._common:
                    self._next, self._common = place, common
            if self._next:
                return


class _Places:
    """The places behind each n-gram of a growing text.

    n-grams count as equal where their hashes are, so that places must be compared. Those of the beginning are sorted
    once, in arrays: a long prompt takes neither long nor much memory.

    Args:
        tokens: the text, which others append to.
        numbers: the same, [tokens] uint64.
        size: n.
    """

    def __init__(self, tokens: list[int], numbers: np.ndarray, size: int) -> None:
        self._tokens, self._size = tokens, size
        count = max(0, len(numbers) - size + 1)
        hashes = np.zeros(count, dtype=np.uint64)
        for index in range(size if count else 0):
            hashes = hashes * np.uint64(_FACTOR) + numbers[index : index + count] + np.uint64(1)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = hashes[order], order + size
        # Of what was appended.
        self._appended: dict[int, list[int]] = {}

    def add(self, end: int) -> None:
        """The text has grown by one token to `end`."""
        if end >= self._size:
            self._appended.setdefault(self._hash(end), []).append(end)

    def before(self, end: int) -> list[int]:
        """The latest places before `end`, where the text ends, with the same n-gram; the last one first."""
        if end < self._size:
            return []
        number = self._hash(end)
        appended = self._appended.get(number, [])[-_PLACES - 1 :]
        key = np.uint64(number)
        first, stop = self._hashes.searchsorted(key, "left"), self._hashes.searchsorted(key, "right")
        found = [*self._places[max(first, stop - _PLACES - 1) : stop].tolist(), *appended]
        return [place for place in reversed(found) if place < end][:_PLACES]

    def _hash(self, end: int) -> int:
        number = 0
        for token in self._tokens[end - self._size : end]:
            number = (number * _FACTOR + token + 1) & _ALL_BITS
        return number


def _common_end(tokens: Sequence[int], place: int, end: int) -> int:
    """How many tokens before `place` equal those before `end`, at most LONGEST."""
    common = 0
    while common < min(LONGEST, place) and tokens[place - 1 - common] == tokens[end - 1 - common]:
        common += 1
    return common


def _class_of(common: int) -> int:
    """The class of a common end of so many tokens, at least 2."""
    found = 0
    while found + 1 < len(_LEAST) and _LEAST[found + 1] <= common:
        found += 1
    return found
