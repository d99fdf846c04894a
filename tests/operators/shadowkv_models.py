"""Tiny models with ShadowKV in them, and conversations of two turns."""

from __future__ import annotations

import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.rules.rule_file import parse_rules
from tests.support.devices import CPU, model_on
from tests.support.tiny_models import tiny_model

#: Full rank of the tiny models, and everything attended.
COVERING = {
    "rank": 32,
    "landmark_chunk_size": 4,
    "outlier_chunks": 3,
    "local_chunks": 2,
    "sparse_budget": "all",
    "value_type": "FP32",
}
FULL_RANK = {"deepseek_v3": 96, "gpt_neox": 64, "internlm3": 64}
CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
_models = {}


def shadowkv_in(pattern, settings):
    return {"match": {"name": pattern}, "replace": {"class": "ShadowKVAttention", "kwargs": settings}}


def injected(model, *rules, max_seq_len=512, **settings):
    """The model with ShadowKV where no other rule is, and a new cache."""
    settings = {**COVERING, **settings}
    everywhere = shadowkv_in(r"(self_attn|attention)$", settings)
    long_context = {"chunk_size": 16, "max_seq_len": max_seq_len}
    inject(model, parse_rules({"rules": [*rules, CHUNKED, everywhere], "long_context": long_context}))
    return HeteroCache(model)


def model_of(architecture):
    if architecture not in _models:
        _models[architecture] = tiny_model(architecture)
    return _models[architecture]


def random_tokens(count, seed=0, batch=1):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits(model, cache, *parts):
    """Logits of prompts and single tokens, one after the other."""
    with torch.no_grad():
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits.cpu() for part in parts], dim=1)


def conversation(prompt, answer, turn, again, batch=1):
    """Two turns: a prompt, tokens one by one, a prompt, tokens one by one."""
    counts = (prompt, answer, turn, again)
    first, generated, second, more = (random_tokens(n, seed, batch) for seed, n in enumerate(counts, start=1))
    return [first, *generated.split(1, dim=1), second, *more.split(1, dim=1)]


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def error_of(model, parts, device=CPU, **settings):
    """Relative error of the logits on a device against the untouched model's on the CPU, and the cache."""
    with torch.no_grad():
        expected = model(torch.cat(parts, dim=1)).logits
    model = model_on(device, model)
    cache = injected(model, **settings)
    try:
        actual = logits(model, cache, *parts)
    finally:
        eject(model)
    return relative_error(actual, expected), cache
