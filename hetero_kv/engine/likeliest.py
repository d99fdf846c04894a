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
        """The likeliest tokens of logits [rows, vocab], on the logits' device, [2, rows] float64: ids, then logits."""
        found = logits.float().max(dim=-1)
        return torch.stack([found.indices.double(), found.values.double()])


class LikeliestRequest:
    """Requests the likeliest next tokens of a forward (`ForwardRequest.likeliest`).

    Attributes:
        rows: the token of each row, after the forward; None if the forward returned logits instead.
    """

    def __init__(self) -> None:
        self.rows: list[Likeliest] | None = None

    def receive(self, found: torch.Tensor) -> None:
        """Receive the numbers of `Likeliest.of`, on the CPU."""
        tokens, logits = found.tolist()
        self.rows = [Likeliest(int(token), logit) for token, logit in zip(tokens, logits, strict=True)]
