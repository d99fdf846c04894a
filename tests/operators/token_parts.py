"""Prompts, later tokens, and the logits of both."""

from __future__ import annotations

import torch


def tokens(count, seed=0, rows=1):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


def logits(model, cache, *parts):
    """Logits of prompts and single tokens, one after the other."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def answer(count, seed=1, rows=1):
    return tokens(count, seed, rows).split(1, dim=1)
