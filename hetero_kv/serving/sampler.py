"""Chooses a request's tokens from the model's logits: penalties, filters, and a random draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from hetero_kv.cpu_ops.token_sampling import drawn, filtered_weights
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.sampling import SamplingParams


class LogitsError(HeteroKVError):
    """No token can be chosen: the logits are not numbers, every token is forbidden, or a mask misbehaves."""


@dataclass(frozen=True)
class Choice:
    """A chosen token.

    Attributes:
        token: its id.
        logprob: its log-probability; None where the request has none.
        alternatives: the likeliest tokens' log-probabilities by id, best first.
    """

    token: int
    logprob: float | None = None
    alternatives: Mapping[int, float] = field(default_factory=dict)


class Sampler:
    """Chooses the tokens of one request, one after the other.

    Every request has a random generator of its own (Philox), which gives one number per token. A seed's tokens
    therefore do not depend on other requests, except that a larger batch may round a model's logits differently.

    Args:
        params: how tokens are chosen.
        prompt: the prompt's token ids, for `repetition_penalty`.
        vocab_size: number of logits; ids in `logit_bias` must be less.
        suppressed: token ids that are never chosen; those that the model does not have are ignored.

    Raises HeteroKVError for a biased token that the model does not have.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int], vocab_size: int, suppressed: Iterable[int] = ()
    ) -> None:
        for token in params.logit_bias:
            if not 0 <= token < vocab_size:
                raise HeteroKVError(f"logit_bias names token {token}; the model has tokens 0 to {vocab_size - 1}")
        self.params = params
        self._random = np.random.Generator(np.random.Philox(params.seed))
        self._counts: dict[int, int] = {}
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        biases = params.logit_bias
        self._biased = torch.tensor(list(biases), dtype=torch.int64), torch.tensor(list(biases.values())).float()
        self._penalizes = bool(params.presence_penalty or params.frequency_penalty)
        self._suppressed = torch.tensor([token for token in suppressed if token < vocab_size], dtype=torch.int64)

    @property
    def _changes_logits(self) -> bool:
        params = self.params
        changes = self._seen or self._penalizes or params.logit_bias or len(self._suppressed)
        return bool(params.mask is not None or changes)

    @property
    def takes_likeliest(self) -> bool:
        """Whether every token is the likeliest by the unchanged logits, and nothing else needs the logits."""
        params = self.params
        untouched = params.repetition_penalty == 1 and not self._changes_logits
        return params.is_greedy and params.logprobs is None and untouched

    def choose(self, logits: torch.Tensor | Likeliest) -> Choice:
        """The next token, by the model's logits [vocab] of any float type, which are not changed.

        If it `takes_likeliest`, `logits` may be that token, already known.

        Raises LogitsError if no token can be chosen.
        """
        params = self.params
        if isinstance(logits, Likeliest):
            return Choice(_finite(logits))
        if self.takes_likeliest:
            return Choice(_likeliest(logits))
        own = logits.detach().to("cpu", torch.float32, copy=self._changes_logits)
        found = None if params.logprobs is None else torch.log_softmax(own, dim=-1)
        self._penalize(own)
        if params.mask is not None:
            returned: object = params.mask.apply(own)  # type: ignore[func-returns-value]
            if returned is not None:
                raise LogitsError(
                    f"the mask's apply returned a {type(returned).__name__}; it must change the logits in place, and "
                    "return nothing"
                )
        token = _likeliest(own) if params.is_greedy else self._drawn(own)
        self._record(token)
        if found is None:
            return Choice(token)
        best = found.topk(params.logprobs) if params.logprobs else None
        alternatives = {} if best is None else dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Choice(token, float(found[token]), alternatives)

    def skip(self, tokens: Iterable[int]) -> None:
        """Continue after tokens that were chosen elsewhere with the same parameters."""
        for token in tokens:
            if not self.params.is_greedy:
                self._random.random()
            self._record(token)

    def _record(self, token: int) -> None:
        """Record a token of the answer."""
        if self.params.mask is not None:
            self.params.mask.accept(token)
        if self._penalizes:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.repetition_penalty != 1:
            self._seen.add(token)

    def _penalize(self, logits: torch.Tensor) -> None:
        """Apply penalties and biases to the logits, and suppress tokens, in place."""
        params = self.params
        if self._seen:
            ids = torch.tensor(list(self._seen), dtype=torch.int64)
            found, factor = logits[ids], params.repetition_penalty
            logits[ids] = torch.where(found < 0, found * factor, found / factor)
        if self._counts:
            ids = torch.tensor(list(self._counts), dtype=torch.int64)
            counts = torch.tensor(list(self._counts.values())).float()
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if len(self._biased[0]):
            logits[self._biased[0]] += self._biased[1]
        logits[self._suppressed] = -math.inf

    def _drawn(self, logits: torch.Tensor) -> int:
        _likeliest(logits)
        return drawn(self._weights(logits), self._random.random())

    def _weights(self, logits: torch.Tensor) -> np.ndarray:
        """The tokens' unnormalised probabilities [vocab] from logits [vocab] float32, 0 for filtered tokens."""
        params = self.params
        return filtered_weights(logits.numpy(), params.temperature, params.top_k, params.top_p, params.min_p)


def _likeliest(logits: torch.Tensor) -> int:
    """The id of the largest logit. Raises LogitsError if it is no finite number."""
    if logits.device.type != "cpu":
        token = int(logits.argmax())
        return _finite(Likeliest(token, float(logits[token])))
    # numpy's is ten times as fast as torch's. NaN counts as the largest.
    numbers = logits.detach().float().numpy()
    token = int(numbers.argmax())
    return _finite(Likeliest(token, float(numbers[token])))


def _finite(likeliest: Likeliest) -> int:
    """The id of the likeliest token. Raises LogitsError if its logit is no finite number."""
    token, largest = likeliest
    if math.isfinite(largest):
        return token
    if largest == -math.inf:
        raise LogitsError("every token is forbidden, by logit_bias or by a mask; allow at least one")
    raise LogitsError(
        f"the model's largest logit is {largest}, from which no token can be chosen; a model in float16 may overflow: "
        "load it with dtype='bfloat16' or 'float32'"
    )
