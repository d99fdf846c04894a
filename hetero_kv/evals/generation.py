"""Greedy answers, token by token, on the cache of any method."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.engine.statistics import layer_means
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.model_answers import suppressed_tokens
from hetero_kv.serving.sampler import Choice, Sampler
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.speculation.drafter import DraftCounts
from hetero_kv.serving.speculation.speculation import Speculation


@dataclass(frozen=True)
class Generated:
    """A greedy continuation.

    Attributes:
        tokens: the most likely tokens, including an end-of-turn token. The last one is not in the cache yet.
        seconds: the duration of the tokens after the first.
        drafts: how many tokens were guessed and verified, and how many of them were right.
    """

    tokens: list[int]
    seconds: float
    drafts: DraftCounts


def prompt_logits(model: Any, tokens: Sequence[int], cache: Cache, question: int | None = None) -> torch.Tensor:
    """Feed a prompt to the model; returns the logits after its last token, [1, vocab].

    The last `question` tokens ask about the earlier ones; None if unknown (`HeteroCache.asking`).
    """
    logits = ModelForward(model).prompt(cache, tokens, question)[None]
    if logits.is_cuda:
        # Callers measure the duration.
        torch.cuda.synchronize(logits.device)
    return logits


def greedy(
    model: Any,
    cache: Cache,
    logits: torch.Tensor,
    max_new_tokens: int,
    ends: Container[int],
    on_logits: Callable[[torch.Tensor], None] | None = None,
    *,
    before: Sequence[int] = (),
    speculation: Speculation | None = None,
) -> Generated:
    """The most likely continuation after `cache`: the same as `generate(do_sample=False)` without penalties.

    Args:
        logits: [1, vocab] after the last token in the cache.
        ends: tokens that end an answer.
        on_logits: called with [1, vocab] before each token is chosen.
        before: the tokens in the cache, which `speculation` needs.
        speculation: guesses tokens; None decodes one at a time.
    """
    sampler = _WatchedSampler(logits.shape[-1], suppressed_tokens(model), on_logits)
    start = time.perf_counter()
    tokens: list[int] = []
    with AnswerTokens(
        ModelForward(model), cache, sampler, before, logits[0], speculation, limit=max_new_tokens
    ) as answer:
        for choice in answer:
            tokens.append(choice.token)
            if choice.token in ends or len(tokens) == max_new_tokens:
                break
    return Generated(tokens, time.perf_counter() - start, answer.counts)


class _WatchedSampler(Sampler):
    """Takes the likeliest tokens, and forwards their logits."""

    def __init__(
        self, vocab_size: int, suppressed: Sequence[int], on_logits: Callable[[torch.Tensor], None] | None
    ) -> None:
        super().__init__(SamplingParams(), (), vocab_size, suppressed)
        self._on_logits = on_logits

    @property
    def takes_likeliest(self) -> bool:
        """See Sampler; logits that are passed on are read besides."""
        return self._on_logits is None and super().takes_likeliest

    def choose(self, logits: torch.Tensor | Likeliest) -> Choice:
        if self._on_logits is not None:
            assert isinstance(logits, torch.Tensor)
            self._on_logits(logits[None])
        return super().choose(logits)


def counted(cache: Cache) -> dict[str, float]:
    """The layers' statistics (`HeteroCache.statistics`), each the mean over the layers that have a value."""
    return layer_means(cache.statistics) if isinstance(cache, HeteroCache) else {}


def cache_bytes(cache: Cache) -> int:
    """Bytes of the stored keys and values and of a method's other data about them, in DRAM and on devices."""
    total = cache.dram_bytes + cache.device_bytes if isinstance(cache, HeteroCache) else 0
    for layer in cache.layers:
        if not isinstance(layer, FamilyLayer):
            total += sum(tensor.numel() * tensor.element_size() for tensor in hf_cache_layers.tensors(layer))
    return total
