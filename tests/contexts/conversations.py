"""Conversations of random tokens with tiny models, and what follows them."""

from __future__ import annotations

import torch
from small_families import random_tokens

#: Tokens that are compared behind a load.
NEXT = 20


def said(model, cache, *parts):
    """The conversation's turns, each a prompt and tokens that were fed one by one; returns all that were given."""
    given = []
    with torch.no_grad():
        for prompt, answer in parts:
            model(prompt, past_key_values=cache)
            for at in range(answer.shape[1]):
                model(answer[:, at : at + 1], past_key_values=cache)
            given += [prompt, answer]
    return torch.cat(given, dim=1)


def goes_on(model, cache, tokens, seed):
    """The next tokens, the likeliest each, behind a short turn: their ids, and all logits."""
    logits = []
    with torch.no_grad():
        token = random_tokens(5, seed, len(tokens))
        for _ in range(NEXT):
            logits.append(model(token, past_key_values=cache).logits)
            token = logits[-1][:, -1:].argmax(dim=-1)
    return torch.cat(logits, dim=1)
