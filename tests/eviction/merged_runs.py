"""Runs of policies that merge evicted entries into kept ones: D2O and CaM."""

from __future__ import annotations

import torch

from tests.eviction.bounded_runs import BUDGET, PROMPT, tokens

FEW = 20


def turns(generated=FEW, batch=1):
    """A prompt and single tokens."""
    return [tokens(PROMPT, batch=batch), *tokens(generated, 1, batch).split(1, dim=1)]


def run(model, cache, parts):
    """Logits, and each layer's entries after each part."""
    logits, kept = [], []
    with torch.no_grad():
        for part in parts:
            logits.append(model(part, past_key_values=cache).logits)
            assert all(layer.num_entries == min(layer.budget, layer.length) for layer in cache.layers)
            assert sum(layer.num_entries for layer in cache.layers) <= BUDGET * len(cache.layers)
            kept.append([layer.entries for layer in cache.layers])
    return torch.cat(logits, dim=1), kept


def passes(calls):
    """One layer's calls, those of the prompt joined."""
    count = -(-PROMPT // 16)
    yield [torch.cat(parts, 1) for parts in zip(*calls[:count], strict=True)]
    yield from calls[count:]
