"""Forces a text through decoding, token by token, whatever the model would choose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class ForcedTokens:
    """A `TokenMask` that allows only the next one of given tokens.

    Args:
        tokens: the answer that is forced, at least one token.
        choices: alternatives to the last token, whose log-probabilities are recorded too.

    Attributes:
        choice_logprobs: the log-probabilities of `choices` by the model's own logits, nats; empty before the last step.
    """

    def __init__(self, tokens: Sequence[int], choices: Sequence[int]) -> None:
        self._tokens, self._choices = list(tokens), list(choices)
        self._position = 0
        self.choice_logprobs: list[float] = []

    def apply(self, logits: torch.Tensor) -> None:
        """Forbid all tokens but the next one, in the logits [vocab] float32, in place."""
        if self._position == len(self._tokens) - 1:
            # No penalty and no bias changes them before a mask.
            self.choice_logprobs = torch.log_softmax(logits, dim=-1)[self._choices].tolist()
        logits.fill_(-math.inf)
        # Not its own logit, which may be -inf: an impossible token has a log-probability too.
        logits[self._tokens[self._position]] = 0.0

    def accept(self, token: int) -> None:
        """Go on to the next token."""
        self._position += 1
