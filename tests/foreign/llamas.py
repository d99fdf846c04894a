"""A tiny Llama under rules that attend to everything, compared with the untouched model."""

from __future__ import annotations

import torch

from hetero_kv import HeteroCache, inject
from tests.support.tiny_models import tiny_model

EVERYTHING = {"block_size": 4, "max_seq_len": 128, "kv_type": "FP32", "top_k_blocks": "all", "chunk_size": 16}
PROMPT = (torch.arange(40) % 90 + 2)[None]
# Of weights of eight bits.
ROUNDING = 5e-2
TOKENS = torch.tensor([[3, 7, 11]])


def llama(seed=0, **config):
    model = tiny_model("llama", seed, num_hidden_layers=2, **config)
    for layer in model.model.layers:
        # Attention that is less peaked makes less of rounding.
        layer.self_attn.q_proj.weight.data.mul_(0.3)
    return model


def injected(model, **settings):
    inject(model, "quest", command_line=EVERYTHING | settings)
    return model


@torch.no_grad()
def untouched(model):
    """Logits of the prompt and some tokens, without rules."""
    return model(torch.cat([PROMPT, TOKENS], dim=1)).logits


@torch.no_grad()
def computed(model, cache=None, called=None):
    """The same logits with rules: a prompt in chunks, then tokens one by one.

    called: what is called, where that is something around the model.
    """
    called = called or model
    cache = cache if cache is not None else HeteroCache(model)
    logits = [called(input_ids=PROMPT, past_key_values=cache).logits]
    logits += [called(input_ids=token, past_key_values=cache).logits for token in TOKENS.split(1, dim=1)]
    return torch.cat(logits, dim=1)


def difference(mine, expected):
    """Relative, of norms."""
    return float((mine - expected).norm() / expected.norm())


@torch.no_grad()
def prefilled(model, called=None):
    """A cache with the prompt."""
    cache = HeteroCache(model)
    (called or model)(input_ids=PROMPT, past_key_values=cache)
    return cache


@torch.no_grad()
def next_logits(model, cache, called=None):
    return (called or model)(input_ids=TOKENS[:, :1], past_key_values=cache).logits
