"""The resident prefix: tokens whose KV a file already has, so memory is planned only for the rest."""

from __future__ import annotations

from typing import NamedTuple


class ResidentPrefix(NamedTuple):
    """The KV of a cache's sequences that exists before memory is planned.

    Attributes:
        tokens: stored tokens of each sequence, the minimum over the sequences.
        mapped: bytes of blocks that are mapped from files: the system reads their pages on demand, and may drop them
            again.
    """

    tokens: int = 0
    mapped: int = 0

    def first(self, tokens: int) -> ResidentPrefix:
        """The part of it that belongs to the first `tokens` of each sequence."""
        return ResidentPrefix(tokens, self.mapped * tokens // self.tokens) if tokens < self.tokens else self


NO_RESIDENT_PREFIX = ResidentPrefix()
