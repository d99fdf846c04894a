"""Greedy answers, token by token, on the cache of any method."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.statistics import layer_means


@dataclass(frozen=True)
class Generated:
    """A greedy continuation.

    Attributes:
        tokens: the most likely tokens, including an end-of-turn token. The last one is not in the cache yet.
        seconds: the duration of the tokens after the first.
    """

    tokens: list[int]
    seconds: float


@torch.no_grad()
def last_logits(model: Any, tokens: Iterable[int], cache: Cache, question: int | None = None) -> torch.Tensor:
    """Feed `tokens` to the model; returns the logits after the last one, [1, vocab].

    The last `question` tokens ask about the earlier ones; None if unknown (`HeteroCache.asking`).
    """
    input_ids = torch.tensor([list(tokens)], device=model.device)
    # The logits of a whole prompt would take a hundred times the memory of its keys and values.
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with cache.asking(question) if isinstance(cache, HeteroCache) else nullcontext():
        logits = model(input_ids=input_ids, use_cache=True, **as_cache(model.forward, cache), **keep).logits[:, -1]
    if logits.is_cuda:
        # Callers measure the duration.
        torch.cuda.synchronize(logits.device)
    return logits


def greedy(
    model: Any,
    cache: Cache,
    logits: torch.Tensor,
    max_new_tokens: int,
    ends: frozenset[int],
    on_logits: Callable[[torch.Tensor], None] | None = None,
) -> Generated:
    """The most likely continuation after `cache`: the same as `generate(do_sample=False)` without penalties.

    Args:
        logits: [1, vocab] after the last token in the cache.
        ends: tokens that end an answer.
        on_logits: called with [1, vocab] before each token is chosen.
    """
    tokens: list[int] = []
    start = time.perf_counter()
    while True:
        if on_logits is not None:
            on_logits(logits)
        tokens.append(int(logits.argmax(dim=-1)))
        if tokens[-1] in ends or len(tokens) == max_new_tokens:
            return Generated(tokens, time.perf_counter() - start)
        logits = last_logits(model, tokens[-1:], cache)


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end an answer, from the model's generation config."""
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


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
