"""A sample's prompt as tokens, and its prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from hetero_kv.evals.shared_prefill import RecordedPrefill


class Prompt:
    """A sample's first turn as tokens, and its prefill, recorded when a method first needs it.

    Attributes:
        tokens: the prompt's tokens.
        capacity: tokens that a cache must have room for, for the whole sample.
        question: how many of the last tokens are the question about the earlier ones; None if unknown.
    """

    def __init__(self, tokens: Sequence[int], capacity: int, question: int | None = None) -> None:
        self.tokens = list(tokens)
        self.capacity = capacity
        self.question = question
        self.recording: RecordedPrefill | None = None
        self.recording_s = 0.0


@dataclass
class Prefilled:
    """A prompt in a model's cache.

    Attributes:
        model: the model with the method's rules injected.
        logits: [1, vocab] after the prompt's last token.
        seconds: the prefill's duration.
        shared: whether several methods share the computation of the prefill.
    """

    model: Any
    cache: Cache
    logits: torch.Tensor
    seconds: float
    shared: bool
