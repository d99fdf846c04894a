"""Models with RetrievalAttention in every layer, and the choices of their steps."""

from __future__ import annotations

import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.step_contract import EVERYTHING
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules.rule_file import parse_rules

SMALL = {"block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 512}


def injected(model, **settings):
    """The model with these settings in every layer, and a new cache."""
    every = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    layer = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    inject(model, parse_rules({"rules": [every, layer], "long_context": {**SMALL, **settings}}))
    return HeteroCache(model)


def random_tokens(count, seed=0):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def logits(model, cache, *parts):
    """Logits of prompts and single tokens, one after the other."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def recorded(monkeypatch):
    """A list that fills with (layer, token, positions in the Context, q, cache layer) of every selection."""
    record, positions_seen = [], []
    attend = RetrievalAttention._attend_natively

    def noting(call):
        def noted(native, q, k, v, ranges, table, which, positions, *rest):
            largest = call(native, q, k, v, ranges, table, which, positions, *rest)
            if which != EVERYTHING:
                positions_seen.append(positions.copy())
            return largest

        return noted

    def kept(self, native, groups, q, *rest, **named):
        positions_seen.clear()
        masses = attend(self, native, groups, q, *rest, **named)
        if positions_seen:
            layer, step = groups[0][:2]
            by_kv_head = q.reshape(len(q), -1, native.group, q.shape[3])
            decoded = step.past - step.group.prompt_length
            record.append((self.layer_idx, decoded, positions_seen[0], by_kv_head.copy(), layer))
        return masses

    monkeypatch.setattr(RetrievalStep, "__call__", noting(RetrievalStep.__call__))
    monkeypatch.setattr(RetrievalAttention, "_attend_natively", kept)
    return record
