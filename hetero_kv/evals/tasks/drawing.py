"""Seeded random material for samples: numbers, UUIDs and words, all different within a sample."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from hetero_kv.evals.scorers import optional_library


@dataclass(frozen=True)
class Cell:
    """A sample's place in a run; it determines everything random in the sample.

    Attributes:
        task: the task's name.
        seed: the run's seed.
        length: tokens.
        depth: per cent, or None.
        number: from 0 among the samples of one length and depth.
    """

    task: str
    seed: int
    length: int
    depth: float | None
    number: int

    @property
    def id(self) -> str:
        """The sample's id: "needle/4096/50/0", or without the depth if there is none."""
        depth = "" if self.depth is None else f"/{self.depth:g}"
        return f"{self.task}/{self.length}{depth}/{self.number}"

    def random(self, purpose: str) -> random.Random:
        """A separate random stream for each purpose, so that drawing more of one thing does not change another."""
        return random.Random(f"{self.seed}/{self.id}/{purpose}")


class Different:
    """Draws from `draw` until the value is new."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw = draw
        self._used: set[str] = set()

    def next(self) -> str:
        """The next value, different from all earlier ones."""
        value = self._draw()
        while value in self._used:
            value = self._draw()
        self._used.add(value)
        return value

    def take(self, count: int) -> list[str]:
        """The next `count` values."""
        return [self.next() for _ in range(count)]


def number(rng: random.Random, digits: int = 7) -> str:
    """A random number with this many digits, which does not begin with 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def uuid4(rng: random.Random) -> str:
    """A random UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def word_pair(rng: random.Random) -> str:
    """An adjective and a noun, joined by a hyphen: RULER's words.

    Raises:
        HeteroKVError: without the word lists of the `eval` extra.
    """
    return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"


@cache
def english_words() -> tuple[str, ...]:
    """RULER's vocabulary: the nouns, adjectives and verbs of wonderwords, sorted.

    Raises:
        HeteroKVError: without the word lists of the `eval` extra.
    """
    return tuple(sorted({*_words("noun"), *_words("adjective"), *_words("verb")}))


@cache
def _words(category: str) -> tuple[str, ...]:
    wonderwords = optional_library("wonderwords", needed_for="RULER's words")
    return tuple(sorted(set(wonderwords.RandomWord().filter(include_categories=[category]))))
