"""Conversations of random tokens with tiny models, and what follows them."""

from __future__ import annotations

import torch

from tests.support.small_families import random_tokens

#: Tokens that are compared behind a load.
NEXT = 14


def said(model, cache, *parts):
    """Feed turns, each a prompt and then single tokens; return all tokens."""
    fed = []
    with torch.no_grad():
        for prompt, answer in parts:
            model(prompt, past_key_values=cache)
            for at in range(answer.shape[1]):
                model(answer[:, at : at + 1], past_key_values=cache)
            fed += [prompt, answer]
    return torch.cat(fed, dim=1)


def goes_on(model, cache, tokens, seed):
    """Logits of a short turn and of the greedy tokens after it."""
    logits = []
    with torch.no_grad():
        token = random_tokens(5, seed, len(tokens))
        for _ in range(NEXT):
            logits.append(model(token, past_key_values=cache).logits)
            token = logits[-1][:, -1:].argmax(dim=-1)
    return torch.cat(logits, dim=1)
