"""The part of a sequence that is stored already when memory is planned, as for a context that is loaded from a file."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """The stored beginning of a cache's sequences.

    Attributes:
        tokens: stored tokens of the shortest sequence.
        mapped: bytes of blocks that are mapped from files. The system reads their pages on use and may drop them again.
    """

    tokens: int = 0
    mapped: int = 0

    def first(self, tokens: int) -> Held:
        """The part that belongs to the first `tokens` of each sequence."""
        return Held(tokens, self.mapped * tokens // self.tokens) if tokens < self.tokens else self


NOTHING_HELD = Held()
