"""How a request's tokens are chosen, and when its answer ends."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hetero_kv.errors import ConfigError

#: The most alternatives whose log-probabilities a request may ask for, as in OpenAI's API.
MOST_LOGPROBS = 20
#: The largest numbers that are added to logits and divide them; float32, in which logits are, ends at 3e38.
LARGEST = 1e30


class TokenMask(Protocol):
    """A grammar, or another rule, for which tokens may come next. One object belongs to one request."""

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [vocab] float32 of forbidden tokens to minus infinity, in place."""

    def accept(self, token: int) -> None:
        """Record the token that was chosen."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen.

    The order is that of transformers: penalties and biases, the mask, temperature, `top_k`, `top_p`, `min_p`.

    Attributes:
        max_new_tokens: the longest answer, tokens.
        temperature: 0 takes the likeliest token (greedy).
        top_k: sample from this many of the likeliest tokens; 0: from all.
        top_p: sample from the likeliest tokens that have this share of the probability.
        min_p: sample from tokens with at least this share of the likeliest token's probability.
        repetition_penalty: divides positive logits of tokens in the prompt and the answer, and multiplies negative ones
            (Keskar et al. 2019, arXiv:1909.05858); 1 for none.
        presence_penalty: subtracted from the logit of every token in the answer, as in OpenAI's API.
        frequency_penalty: subtracted once for every time that a token is in the answer.
        logit_bias: token id -> a number that is added to its logit.
        seed: makes sampling repeatable; None draws a seed. Other requests and known beginnings of the prompt change
            nothing but the rounding of the model's logits.
        stop: non-empty texts; the first one that appears ends the answer, which ends before it. A text that spells a
            control token stands for that token, which has no text.
        ends: token ids that end the answer besides the model's own.
        ignore_eos: whether the model's own end-of-turn tokens do not end the answer.
        logprobs: how many alternatives of each token get log-probabilities; 0 for the chosen token's alone; None for
            no log-probabilities. They are those of the model, before penalties, the mask and temperature.
        mask: which tokens may come next.

    Raises ConfigError for a value outside its range, naming it.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    mask: TokenMask | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "ends", tuple(self.ends))
        for name in ("max_new_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            self._require(name, value is None or _is_whole(value), "a whole number")
        self._require("ends", all(map(_is_whole, self.ends)), "token ids")
        self._require("logit_bias", all(map(_is_whole, self.logit_bias)), "numbers by token id")
        self._require("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        self._require("temperature", 0 <= self.temperature < math.inf, "at least 0; 0 takes the likeliest token")
        self._require("top_k", self.top_k >= 0, "at least 0; 0 samples from all tokens")
        self._require("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        penalty = self.repetition_penalty
        self._require("repetition_penalty", 1 / LARGEST <= penalty <= LARGEST, "more than 0; 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, abs(getattr(self, name)) <= LARGEST, f"from -{LARGEST:g} to {LARGEST:g}; 0 for none")
        small = all(abs(bias) <= LARGEST for bias in self.logit_bias.values())
        self._require(
            "logit_bias", small, f"from -{LARGEST:g} to {LARGEST:g} by token id; -100 forbids a token in practice"
        )
        self._require("seed", self.seed is None or self.seed >= 0, "at least 0, or None")
        self._require("stop", all(self.stop), "non-empty texts")
        within = self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS
        self._require("logprobs", within, f"from 0 to {MOST_LOGPROBS}, or None")

    def _require(self, name: str, holds: bool, requirement: str) -> None:
        # NaN fails every comparison.
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {requirement}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, rather than one drawn at random."""
        return self.temperature == 0
