"""Drafts from what was said before: the longest end of a sequence that also occurs earlier in it goes on as there.

Prompt lookup (Saxena 2023), with the choice among several places of REST (He et al. 2023, arXiv:2311.08252): the place
with the longest common end counts, among equals the last one. Whether its next token was right is seen at every token,
drafted or not, so that the odds of a guess cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Tokens of the hashed n-grams, the longer tried first.
GRAMS = (6, 2)
# How many earlier places of an n-gram are compared.
_PLACES = 16
#: The longest common end that is told from others, tokens.
LONGEST = 32
# By length of the common end (from 2, 3, 5, 9, 17 and 32 tokens on): how often its next token is right, at first.
_LEAST = (2, 3, 5, 9, 17, 32)
_FIRST_ODDS = (0.25, 0.35, 0.5, 0.65, 0.8, 0.9)
# How many tokens these count for, and how fast earlier ones are forgotten.
_FIRST_WEIGHT = 3.0
_KEPT = 0.93


class LookupDrafter:
    """Guesses the next tokens of one sequence. A token takes constant time.

    Args:
        tokens: of the prompt, documents included.
    """

    #: Seconds that a guess takes; nothing that counts beside a forward.
    guess_s = 0.0

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._tables = [_Places(self._tokens, size) for size in GRAMS]
        self._right = [odds * _FIRST_WEIGHT for odds in _FIRST_ODDS]
        self._seen = [_FIRST_WEIGHT] * len(_FIRST_ODDS)
        # The place of the next token in the earlier text (0: none), and the length of the common end before it.
        self._next, self._common = 0, 0
        self._look_up()

    def add(self, token: int) -> None:
        """The sequence goes on with this token."""
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
            # Text that repeats itself goes on with what was guessed.
            found.append(tokens[index] if index < end else found[index - end])
        return found

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
    """The places behind each n-gram of a growing text, the last one first.

    Args:
        tokens: the text, which others append to.
        size: n.
    """

    def __init__(self, tokens: list[int], size: int) -> None:
        self._tokens, self._size = tokens, size
        self._last: dict[tuple[int, ...], int] = {}
        #: Of each place, the one before with the same n-gram; 0: none.
        self._before = [0] * (len(tokens) + 1)
        if len(tokens) >= size:
            grams = np.lib.stride_tricks.sliding_window_view(np.array(tokens, dtype=np.int64), size)
            order = np.lexsort(grams.T[::-1])
            equal = (grams[order[1:]] == grams[order[:-1]]).all(axis=1)
            before = np.zeros(len(grams), dtype=np.int64)
            before[order[1:][equal]] = order[:-1][equal] + size
            self._before[size:] = before.tolist()
            last = order[np.append(~equal, True)]
            self._last = dict(zip(map(tuple, grams[last].tolist()), (last + size).tolist(), strict=True))

    def add(self, end: int) -> None:
        """The text has grown by one token to `end`."""
        place = 0
        if end >= self._size:
            gram = tuple(self._tokens[end - self._size : end])
            place = self._last.get(gram, 0)
            self._last[gram] = end
        self._before.append(place)

    def before(self, end: int) -> list[int]:
        """The latest places before `end`, where the text ends, with the same n-gram."""
        found: list[int] = []
        place = self._before[end]
        while place and len(found) < _PLACES:
            found.append(place)
            place = self._before[place]
        return found


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
