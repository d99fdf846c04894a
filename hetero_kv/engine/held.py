"""What a context that is gone on from has already, and where: it is planned for what comes beside."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """What is there of a cache's sequences before memory is planned for them.

    Attributes:
        tokens: stored of each sequence, the fewest.
        mapped: bytes of blocks that lie in files as they are in memory: their pages are read as they are needed, and
            may be dropped again.
    """

    tokens: int = 0
    mapped: int = 0

    def first(self, tokens: int) -> Held:
        """What of it the first `tokens` of each sequence have."""
        return Held(tokens, self.mapped * tokens // self.tokens) if tokens < self.tokens else self


NOTHING_HELD = Held()
