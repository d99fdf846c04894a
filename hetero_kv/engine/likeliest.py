"""The likeliest next tokens of a forward, in place of its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Likeliest(NamedTuple):
    """The likeliest next token of a row.

    Attributes:
        token: its id.
        logit: its logit; NaN if any logit is.
    """

    token: int
    logit: float

    @staticmethod
    def of(logits: torch.Tensor) -> torch.Tensor:
        """Those of logits [rows, vocab], as numbers on their device, [2, rows] float64: ids, then logits."""
        found = logits.float().max(dim=-1)
        return torch.stack([found.indices.double(), found.values.double()])


class LikeliestRequest:
    """Requests the likeliest next tokens of a forward (`HeteroCache.likeliest`).

    Attributes:
        rows: those of each row, once the forward is over; None where it has left the request to its caller, and returns
            logits.
    """

    def __init__(self) -> None:
        self.rows: list[Likeliest] | None = None

    def receive(self, found: torch.Tensor) -> None:
        """Take the numbers of `Likeliest.of`, on the CPU."""
        tokens, logits = found.tolist()
        self.rows = [Likeliest(int(token), logit) for token, logit in zip(tokens, logits, strict=True)]
