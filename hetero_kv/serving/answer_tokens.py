"""The tokens of one answer, without an engine: decoded one by one, or several at a time where a draft was right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from transformers.cache_utils import Cache

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import Choice, Sampler
from hetero_kv.serving.speculation.burst import Burst
from hetero_kv.serving.speculation.drafter import DraftCounts
from hetero_kv.serving.speculation.speculation import Speculation, without_guesses


class AnswerTokens(Iterator[Choice]):
    """Chooses the tokens of an answer, without end; the caller stops.

    Between two tokens the cache may hold guesses that follow them. `close` drops the guesses, and leaves all tokens but
    the newest in the cache, as without speculation; it also frees what the drafter keeps.

    Args:
        forward: computes.
        cache: of one row, which stores all `tokens`.
        sampler: chooses.
        tokens: of the prompt, earlier turns included.
        logits: [vocab], after the last of these tokens, as `ModelForward.prefill` returns them.
        speculation: drafts tokens; None decodes one token at a time.
        way: how to draft; None takes the setting of `speculation`.
        limit: the largest number of tokens that the caller will read.

    Attributes:
        counts: numbers of drafted and accepted tokens.

    `next` raises CacheFullError if the token does not fit, LogitsError as the sampler, and the model's own errors. The
    cache is then as before that token.
    """

    def __init__(
        self, forward: ModelForward, cache: Cache, sampler: Sampler, tokens: Sequence[int], logits: torch.Tensor,
        speculation: Speculation | None = None, *, limit: int, way: str | None = None,
    ) -> None:  # fmt: skip
        self._forward, self._cache, self._sampler, self._speculation = forward, cache, sampler, speculation
        self._drafter = None if speculation is None else speculation.drafter(tokens, way)
        self._left, self._newest = limit, 0
        # Seconds of the last forward and of choosing its tokens, without the caller's time; None before the first one.
        self._seconds: float | None = None
        self._burst = Burst(logits[None])
        self.counts = DraftCounts()

    def __next__(self) -> Choice:
        began = time.perf_counter()
        if self._burst.is_over:
            draft = self._drafted()
            # What guesses take is known by itself.
            began = time.perf_counter()
            self._burst, self._seconds = self._forwarded(draft), 0.0
        choice = self._burst.choose(self._sampler)
        self._newest = choice.token
        self._left -= 1
        if self._drafter is not None:
            self._drafter.add(choice.token)
        if self._seconds is not None:
            self._seconds += time.perf_counter() - began
        if self._burst.is_over:
            self._count()
        return choice

    def _drafted(self) -> list[int]:
        cache = self._cache
        if self._drafter is None or self._speculation is None or not isinstance(cache, HeteroCache):
            return []
        return self._speculation.drafts([self._drafter], [cache], [self._left])[0]

    def _forwarded(self, draft: list[int]) -> Burst:
        cache = self._cache
        if draft and isinstance(cache, HeteroCache):
            try:
                logits, stored = self._forward.verify([cache], [[self._newest, *draft]])
                return Burst(logits[0], draft, stored[0])
            except Exception as error:
                # The forward has changed nothing.
                self._drafter = without_guesses(error, self._drafter)
        if self._forward.may_choose and self._sampler.takes_likeliest:
            return Burst(self._forward.likeliest([cache], [self._newest]))
        return Burst(self._forward.decode([cache], [self._newest]))

    def _count(self) -> None:
        burst = self._burst
        self.counts.add(burst.drafted, burst.accepted)
        if self._speculation is not None and self._seconds is not None:
            # Dropping wrong guesses is part of their cost.
            self._speculation.costs.took(1 + burst.drafted, self._seconds)

    def close(self) -> None:
        """Drop the guesses that follow the last token from the cache; no token follows. Further calls do nothing."""
        if not self._burst.is_over:
            self._burst.end()
            self._count()
        if self._drafter is not None:
            self._drafter.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
