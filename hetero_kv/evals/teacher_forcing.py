"""Fidelity to full attention by teacher forcing: the untouched model's greedy continuation, step by step.

Each step compares the two models' next-token distributions after the same tokens, so that one early difference does
not make all later steps incomparable.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.statistics import BLOCK_RECALL
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.shared_prefill import RecordedPrefill
from hetero_kv.rules.injecting import suspended
from hetero_kv.serving.forward import ModelForward


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation of a prompt by the untouched model.

    Attributes:
        tokens: n token ids; the prefill yields the first.
        logits: [n - 1, vocab] float32 on the CPU, after each token but the last: each row chose the next token.
    """

    tokens: tuple[int, ...]
    logits: torch.Tensor


@dataclass(frozen=True)
class Fidelity:
    """The agreement of a method with full attention over a forced continuation.

    Attributes:
        agrees: per step, whether the method's most likely next token is full attention's.
        divergence: per step, the Kullback-Leibler divergence KL(full attention || method) of the next token, nats.
        recall: per layer, the share of the full attention mass that the attended blocks cover, the mean over steps and
            heads; None if it is not measured (`measure_recall`) or the layer retrieves nothing.
    """

    agrees: tuple[bool, ...]
    divergence: tuple[float, ...]
    recall: tuple[float | None, ...]

    @property
    def agreement(self) -> float:
        """The share of steps that agree."""
        return sum(self.agrees) / len(self.agrees)

    @property
    def mean_divergence(self) -> float:
        """The mean divergence per step, nats."""
        return math.fsum(self.divergence) / len(self.divergence)

    def mean_recall(self, first_layer: int = 0) -> float | None:
        """The mean block recall over the layers from `first_layer` on; None if none was measured."""
        measured = [recall for recall in self.recall[first_layer:] if recall is not None]
        return math.fsum(measured) / len(measured) if measured else None


def full_attention_continuation(
    model: PreTrainedModel, prefill: RecordedPrefill, max_new_tokens: int, end_tokens: Collection[int] = ()
) -> Continuation:
    """The untouched model's greedy continuation of a recorded prompt, whatever rules are injected now.

    Args:
        max_new_tokens: at least 2.
        end_tokens: the first of these ends the continuation.

    Raises HeteroKVError if the recording belongs to another model, or `max_new_tokens` is too small to compare.
    """
    if max_new_tokens < 2:
        raise HeteroKVError(
            f"max_new_tokens is {max_new_tokens}; the first token comes out of the prefill, so a comparison takes 2 or "
            "more"
        )
    tokens, logits = [int(prefill.logits.argmax())], []
    with suspended(model):
        cache, forward = prefill.untouched_cache(model), ModelForward(model)
        while len(tokens) < max_new_tokens and tokens[-1] not in end_tokens:
            logits.append(forward.decode([cache], tokens[-1:]).float().cpu())
            tokens.append(int(logits[-1].argmax()))
    vocab = prefill.logits.shape[-1]
    return Continuation(tuple(tokens), torch.cat(logits) if logits else torch.empty(0, vocab))


def force(model: PreTrainedModel, cache: Cache, continuation: Continuation) -> Fidelity:
    """Feed a continuation's tokens to a model, and compare each step with full attention.

    Args:
        model: the model with the method's rules injected.
        cache: the model's cache after the prompt; afterwards it also has the continuation without its last token.

    Raises HeteroKVError for a continuation of a single token, which needs no decode step.
    """
    if len(continuation.tokens) < 2:
        raise HeteroKVError(
            "the continuation is a single token, which comes out of the prefill, so that there is no decoded step to "
            "compare; force a longer one"
        )
    agrees, divergence, forward = [], [], ModelForward(model)
    for token, full in zip(continuation.tokens[:-1], continuation.logits, strict=True):
        logits = forward.decode([cache], [token])[0].float().cpu()
        agrees.append(int(logits.argmax()) == int(full.argmax()))
        divergence.append(_divergence(full, logits))
    known = cache.statistics if isinstance(cache, HeteroCache) else {}
    layers = cache.number_of_layers if isinstance(cache, HeteroCache) else len(cache.layers)
    recall = known.get(BLOCK_RECALL.name, [None] * layers)
    return Fidelity(tuple(agrees), tuple(divergence), tuple(recall))


def _divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) of two next-token distributions from their logits [vocab], nats."""
    # In float64: the terms of close distributions cancel.
    log_p, log_q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return float(torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True))
