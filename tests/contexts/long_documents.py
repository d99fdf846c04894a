"""A document long enough for its file to be mapped, and a tiny model that reads it."""

from __future__ import annotations

from hetero_kv import HeteroCache, inject
from hetero_kv.rules.rule_file import parse_rules
from tests.contexts.conversations import said
from tests.support.small_families import random_tokens
from tests.support.tiny_models import tiny_model

RULES = [
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]
SMALL = {
    "block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 512, "max_seq_len": 2048,
    "top_k_blocks": 3, "threads_num": 1, "representative_type": "MEAN", "kv_type": "FP32",
}  # fmt: skip


def reader(shape=None, **settings):
    """The model, with the rules in it, and these settings besides; of this shape where it is another."""
    model = tiny_model("llama", max_position_embeddings=2048, **(shape or {}))
    inject(model, parse_rules({"rules": RULES, "long_context": SMALL | settings}))
    return model


def document(model, tokens=1201):
    """A cache that holds a document, and its tokens."""
    cache, ids = HeteroCache(model), random_tokens(tokens, 1, 1)
    said(model, cache, (ids, ids[:, :0]))
    return cache, ids[0].tolist()
