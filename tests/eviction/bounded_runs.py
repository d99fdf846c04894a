"""Tiny models with bounded caches, and the chunks that their attention receives."""

from __future__ import annotations

import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.rules.rule_file import parse_rules

PROMPT, GENERATED, CHUNK, BUDGET = 117, 60, 16, 40
MODELS = {
    "llama": {},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "phi": {"num_key_value_heads": 4},
    # Scores that are capped, and attention sinks that are learned.
    "gemma2": {"layer_types": ["full_attention"] * 3},
    "gpt_oss": {"layer_types": ["full_attention"] * 3},
}


def tokens(count, seed=0, batch=1):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def bounded(model, chunk_size=CHUNK, **kwargs):
    rules = [
        {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
        {"match": {"name": r"self_attn$"}, "replace": {"class": "BoundedAttention", "kwargs": kwargs}},
    ]
    inject(model, parse_rules({"rules": rules, "long_context": {"chunk_size": chunk_size}}))
    return HeteroCache(model)


def passes(calls, sizes):
    """The calls of one layer, joined to what lies between two evictions."""
    calls = iter(calls)
    for size in sizes:
        parts = [next(calls)]
        while sum(k.shape[1] for _, k, _ in parts) < size:
            parts.append(next(calls))
        yield torch.cat([q for q, _, _ in parts], 1), torch.cat([k for _, k, _ in parts], 1)


def rotation_of(layer):
    if layer.rotary is None:
        return None
    return lambda vectors, start: layer.rotated(vectors[None], start)[0]
