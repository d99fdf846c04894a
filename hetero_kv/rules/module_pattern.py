"""A rule's `match.name`: a regular expression that is searched in module paths, with limits on size and time."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import regex

from hetero_kv.errors import ConfigError, shown

MOST_CHARACTERS = 500
MOST_GROUPS_DEEP = 8
MOST_REPEATS = 10_000
MOST_SECONDS, MOST_SECONDS_EACH = 1.0, 20e-6
"""Processor time for the searches of a rule set: a fixed budget, plus an allowance per search. A usual search takes
some microseconds."""

_ESCAPES_AND_SETS = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_REPEATS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


@dataclass
class SearchTime:
    """The remaining time for searches, seconds."""

    left: float = MOST_SECONDS


@dataclass(frozen=True)
class ModulePattern:
    """A checked pattern in Python's syntax.

    Attributes:
        time: the time budget, shared by the patterns of a rule set.

    Raises ConfigError for text that is no regular expression, or a pattern larger than module paths need.
    """

    pattern: str
    time: SearchTime = field(default_factory=SearchTime, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Not repr, which would double the backslashes that the user wrote.
        named = f"name '{self.pattern[:MOST_CHARACTERS]}'"
        if len(self.pattern) > MOST_CHARACTERS:
            raise ConfigError(f"{named} has {len(self.pattern):,} characters; the limit is {MOST_CHARACTERS}")
        bare = _ESCAPES_AND_SETS.sub("", self.pattern)
        if _depth(bare) > MOST_GROUPS_DEEP:
            raise ConfigError(f"{named} nests groups more than {MOST_GROUPS_DEEP} deep; nest fewer")
        if _repeats(bare) > MOST_REPEATS:
            raise ConfigError(
                f"{named} repeats more than {MOST_REPEATS:,} times; write * or + for any number of repeats"
            )
        try:
            with warnings.catch_warnings():
                # Python warns of syntax that later versions may read differently.
                warnings.simplefilter("ignore")
                re.compile(self.pattern)
                _compiled(self.pattern)
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{named} is not a regular expression: {error}") from error

    @cached_property
    def _searched(self) -> dict[str, bool]:
        return {}

    def is_in(self, path: str) -> bool:
        """Whether the pattern occurs in a module's path.

        Raises ConfigError when the searches take too long, as with nested repeats.
        """
        if path not in self._searched:
            self._searched[path] = self._search(path)
        return self._searched[path]

    def _search(self, path: str) -> bool:
        self.time.left += MOST_SECONDS_EACH
        before = time.thread_time()
        try:
            found = _compiled(self.pattern).search(path, timeout=self.time.left)
        except TimeoutError:
            found = None
            self.time.left = 0.0
        self.time.left -= time.thread_time() - before
        if self.time.left < 0:
            raise ConfigError(
                f"name '{self.pattern}' takes too long to search, last in {shown(path)}; write it without nested "
                "repeats"
            )
        return found is not None


def _depth(bare: str) -> int:
    depth = deepest = 0
    for character in bare:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _repeats(bare: str) -> int:
    product = 1
    for counts in _REPEATS.findall(bare):
        product = min(product * max(1, *(int(count[:9] or 0) for count in counts)), MOST_REPEATS + 1)
    return product


@lru_cache(1024)
def _compiled(pattern: str) -> regex.Pattern[str]:
    # Unlike Python's `re`, `regex` supports a timeout. VERSION0 is the behaviour of `re`.
    return regex.compile(pattern, regex.VERSION0, cache_pattern=False)
