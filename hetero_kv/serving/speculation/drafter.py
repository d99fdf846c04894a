"""The interface of drafters, which guess the next tokens of one sequence, and counts of their guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    @property
    def guess_s(self) -> float:
        """Seconds that a guess takes."""

    def add(self, token: int) -> None:
        """Record the sequence's next token."""

    def odds(self, most: int) -> list[float]:
        """For each of the next guesses, at most `most`, the probability that it is right if those before are."""

    def release(self) -> None:
        """Free its memory; the next guess allocates it again. It can be called again."""


@dataclass
class DraftCounts:
    """How many tokens were drafted, and how many of these were right."""

    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Add the counts of a forward."""
        self.drafted += drafted
        self.accepted += accepted
