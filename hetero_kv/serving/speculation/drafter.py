"""What guesses the next tokens of one sequence, and how many of its guesses were right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    @property
    def guess_s(self) -> float:
        """Seconds that a guess takes."""

    def add(self, token: int) -> None:
        """The sequence goes on with this token."""

    def odds(self, most: int) -> list[float]:
        """For each of the next guesses, at most `most`, the probability that it is right if those before are."""

    def guesses(self, count: int) -> list[int]:
        """The next guesses, at most `count`, for which there were odds."""

    def release(self) -> None:
        """Give back its memory. Further guesses take it again. Repeatable."""


@dataclass
class DraftCounts:
    """How many tokens were drafted, and how many of these were right."""

    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """So many more."""
        self.drafted += drafted
        self.accepted += accepted
